// Parts of a call: the same elements of every block, for calls whose arrays are copied through
// memory of limited size. Identical on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "comm/call.h"
#include "schedule/collectives.h"

namespace pycoll {

/// Elements [begin, begin + count) of each block.
struct CallPart {
  int64_t begin = 0;
  int64_t count = 0;
};

inline int64_t element_bytes(const Call& call) {
  return static_cast<int64_t>(call.element_size != 0 ? call.element_size : dtype_size(call.dtype));
}

inline bool has_equal_blocks(const Call& call) {
  return call.block_counts == nullptr && call.send_counts == nullptr;
}

/// Elements of a block in a part whose payload has at most `nbytes` bytes, but at least one.
inline int64_t part_elements(const Call& call, int num_ranks, int64_t nbytes) {
  const int64_t bytes = element_bytes(call) * info(call.collective).blocks_per_payload(num_ranks);
  return std::max<int64_t>(nbytes / bytes, 1);
}

/// Calls copy(offset in the caller's buffer, offset in the part's memory, nbytes) for each run of
/// bytes of a part. The buffer has `total` elements.
template <class Copy>
void for_each_run(const Call& call, CallPart part, int64_t total, const Copy& copy) {
  const int64_t size = element_bytes(call);
  if (!has_equal_blocks(call) || part.count == call.count) {
    if (total != 0) copy(int64_t{0}, int64_t{0}, total * size);
    return;
  }
  const int64_t num_blocks = total / call.count;
  for (int64_t block = 0; block < num_blocks; ++block) {
    copy((block * call.count + part.begin) * size, block * part.count * size, part.count * size);
  }
}

}  // namespace pycoll
