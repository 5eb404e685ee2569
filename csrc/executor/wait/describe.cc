#include "executor/wait/describe.h"

#include <algorithm>
#include <cstdio>

#include "reduce/cells.h"
#include "reduce/ops.h"
#include "schedule/collectives.h"
#include "transport/ring/record_limits.h"

namespace pycoll {
namespace {

// Records of other hosts are checked where they arrive, below the folders of these tables.
static_assert(kNumRecordedCollectives == kNumCollectives);
static_assert(kNumRecordedDTypes == kNumDTypes + 1);
static_assert(kNumRecordedOps == kNumOps);

const CollectiveInfo& row_of(const CallRecord& record) {
  return info(static_cast<Collective>(record.collective));
}

std::string describe_shape(const CallRecord& record) {
  std::string text = "(";
  for (int i = 0; i < record.num_dims; ++i) {
    if (i > 0) text += " ";
    text += std::to_string(record.shape[i]);
    if (record.num_dims == 1 || i + 1 < record.num_dims) text += ",";
  }
  return text + ")";
}

std::string arguments_of(const Segment& segment, int rank, const CallRecord& record) {
  const CollectiveInfo& row = row_of(record);
  if (row.id == Collective::kBarrier) return "";
  std::string text = "shape " + describe_shape(record) + ", dtype " +
                     std::string(dtype_name(static_cast<DType>(record.dtype)));
  if (static_cast<DType>(record.dtype) == DType::kOpaque) {
    const std::string_view described = segment.names(rank).read(record.dtype_text);
    text += " of " + std::to_string(record.element_size) + " bytes";
    if (!described.empty()) text += " (" + std::string(described) + ")";
  }
  if (row.has_op) text += ", op " + std::string(op_name(static_cast<Op>(record.op)));
  if (row.has_root) text += ", root " + std::to_string(record.root);
  if ((record.flags & CallRecord::kHasCounts) != 0) text += ", with counts";
  if ((record.flags & CallRecord::kDeterministic) != 0) text += ", deterministic";
  if ((record.flags & CallRecord::kOnDevice) != 0) text += ", on a device";
  if (record.asked != 0) {
    text += ", algorithm " + std::string(segment.names(rank).read(record.asked));
  }
  return text;
}

std::string called(const Segment& segment, int rank, const CallRecord& record,
                   const std::string& more) {
  return "rank " + std::to_string(rank) + " called " + describe_call(segment, rank, record) + more;
}

}  // namespace

std::string describe_operation(const CallRecord& record) {
  return std::string(row_of(record).name) + " #" + std::to_string(record.sequence);
}

std::string describe_call(const Segment& segment, int rank, const CallRecord& record) {
  const std::string_view site = segment.names(rank).read(record.site);
  return std::string(row_of(record).name) + "(" + arguments_of(segment, rank, record) + ")" +
         (site.empty() ? "" : " at " + std::string(site));
}

std::string describe_place(const Segment& segment, int rank, uint64_t sequence) {
  CallRecord record;
  if (!segment.records(rank).read(sequence, &record) || record.site == 0) return "";
  return " at " + std::string(segment.names(rank).read(record.site));
}

std::string describe_difference(const Segment& segment, int first_rank, const CallRecord& first,
                                int second_rank, const CallRecord& second) {
  std::string of_first;
  std::string of_second;
  std::string why;
  if (first.collective == second.collective &&
      arguments_of(segment, first_rank, first) == arguments_of(segment, second_rank, second)) {
    if (first.counts_hash != second.counts_hash) {
      why = (first.flags & CallRecord::kHasCounts) != 0
                ? ", with different counts of the ranks' blocks"
                : ", at different offsets in their registered arrays; the offsets must be equal";
    } else if (first.chosen_hash != second.chosen_hash) {
      const std::string first_name(segment.names(first_rank).read(first.chosen));
      const std::string second_name(segment.names(second_rank).read(second.chosen));
      of_first = ", which runs " + first_name;
      of_second = ", which runs " + second_name;
      why =
          first_name == second_name
              ? "; their schedules of that name differ: its generator must give the same moves on "
                "all ranks"
          : (first.flags & CallRecord::kOnDevice) != 0
              ? "; check that the arrays are registered and the PYCOLL_ variables equal on all "
                "ranks"
              : "; check that the PYCOLL_ variables and the numbers of cores are equal on all "
                "ranks";
    } else if (first.count != second.count) {
      of_first = " with blocks of " + std::to_string(first.count);
      of_second = " with blocks of " + std::to_string(second.count);
    }
  }
  return called(segment, first_rank, first, of_first) + " and " +
         called(segment, second_rank, second, of_second) + why;
}

std::string describe_last(const Segment& segment, int rank) {
  const uint64_t sequence = load_acquire(segment.control(rank).sequence);
  CallRecord record;
  if (sequence == 0) return "it has not called anything yet";
  if (!segment.records(rank).read(sequence, &record))
    return "it is at #" + std::to_string(sequence);
  const TickScale scale = segment.tick_scale();
  const bool running = record.finished == 0;
  const int64_t then_ns = scale.to_ns(running ? record.entered : record.finished_ticks());
  const double ago_s = static_cast<double>(std::max<int64_t>(0, now_ns() - then_ns)) * 1e-9;
  return (running                                       ? "it is in #"
          : record.failed()                             ? "it failed in #"
          : (record.flags & CallRecord::kOnDevice) != 0 ? "it launched #"
                                                        : "it finished #") +
         std::to_string(sequence) + ", " + describe_call(segment, rank, record) + ", " +
         (running ? "since " : "") + describe_seconds(ago_s) + (running ? "" : " ago");
}

std::string describe_seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", s);
  return text;
}

std::string describe_message(bool is_send, DType dtype, size_t nbytes, int32_t tag, int peer) {
  return (is_send ? "send(" : "recv(") + elements_text(dtype, nbytes) + ", tag " +
         std::to_string(tag) + (is_send ? ", to " : ", from ") +
         (peer < 0 ? "any rank" : "rank " + std::to_string(peer)) + ")";
}

std::string describe_failed_message(const Segment& segment, const Failure& failure) {
  if (failure.message == 0 || failure.code == FailureCode::kRevoked) return "";
  const uint64_t newest = load_acquire(segment.control(failure.reporter).message_number);
  for (uint64_t number = newest; number + MessageRing::kNumRecords > newest && number > 0;
       --number) {
    MessageRecord record;
    if (Failure::mark_of(number) != failure.message ||
        !segment.messages(failure.reporter).read(number, &record)) {
      continue;
    }
    const std::string_view site = segment.names(failure.reporter).read(record.site);
    return "rank " + std::to_string(failure.reporter) + "'s " +
           describe_message(record.is_send(), static_cast<DType>(record.dtype), record.nbytes,
                            record.tag, record.peer) +
           (site.empty() ? "" : ", called at " + std::string(site) + ",");
  }
  return "";
}

std::string describe_message_mismatch(const MessageMismatch& mismatch, int receiver) {
  const auto array = [](uint64_t nbytes, uint8_t dtype_number) {
    const auto dtype = static_cast<DType>(dtype_number);
    return elements_text(dtype, nbytes);
  };
  return "rank " + std::to_string(mismatch.source) + " sent " +
         array(mismatch.sent_bytes, mismatch.sent_dtype) + " with tag " +
         std::to_string(mismatch.tag) + " to rank " + std::to_string(receiver) +
         ", whose receive expects " + array(mismatch.expected_bytes, mismatch.expected_dtype) +
         (mismatch.sent_bytes == mismatch.expected_bytes &&
                  mismatch.sent_dtype == mismatch.expected_dtype
              ? " of another dtype"
              : "");
}

}  // namespace pycoll
