#include "comm/counts.h"

#include <string>

#include "base/error.h"
#include "executor/wait/describe.h"

namespace pycoll {

std::vector<int64_t> counts_row(const int64_t* send_counts, const int64_t* recv_counts,
                                int num_ranks) {
  std::vector<int64_t> row(send_counts, send_counts + num_ranks);
  row.insert(row.end(), recv_counts, recv_counts + num_ranks);
  return row;
}

void check_counts(std::span<const int64_t> rows, const Segment& segment, uint64_t sequence) {
  const auto n = static_cast<size_t>(segment.num_ranks());
  const auto place = [&](size_t rank) {
    return describe_place(segment, static_cast<int>(rank), sequence);
  };
  for (size_t src = 0; src < n; ++src) {
    for (size_t dst = 0; dst < n; ++dst) {
      const int64_t sent = rows[2 * n * src + dst];
      const int64_t expected = rows[2 * n * dst + n + src];
      if (sent == expected) continue;
      throw CollectiveMismatchError(
          "all_to_all: rank " + std::to_string(src) + " of " + std::to_string(n) + " sends " +
          std::to_string(sent) + " elements to rank " + std::to_string(dst) + ", which expects " +
          std::to_string(expected) + " from it: send_counts[" + std::to_string(dst) + "] on rank " +
          std::to_string(src) + " and recv_counts[" + std::to_string(src) + "] on rank " +
          std::to_string(dst) + " must be equal; rank " + std::to_string(src) + " called it" +
          place(src) + " and rank " + std::to_string(dst) + place(dst));
    }
  }
}

}  // namespace pycoll
