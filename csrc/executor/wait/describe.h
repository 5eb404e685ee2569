// Text about calls, records and a rank's last operation, for errors that name both sides.
#pragma once

#include <string>

#include "reduce/dtypes.h"
#include "transport/ring/segment.h"

namespace pycoll {

/// `all_reduce #412`.
std::string describe_operation(const CallRecord& record);
/// `all_reduce(shape (3, 4), dtype f32, op sum) at train.py:12 in step`, the call of `rank`.
std::string describe_call(const Segment& segment, int rank, const CallRecord& record);
/// ` at train.py:12 in step`: where `rank` called that operation; empty when this is unknown.
std::string describe_place(const Segment& segment, int rank, uint64_t sequence);
/// `rank 0 called all_reduce(...) and rank 2 called broadcast(...)`. Where the calls have the same
/// text, it adds what the ranks chose differently.
std::string describe_difference(const Segment& segment, int first_rank, const CallRecord& first,
                                int second_rank, const CallRecord& second);
/// The last operation of `rank`, and its age: `it finished all_reduce #3 ... 1.2 s ago`.
std::string describe_last(const Segment& segment, int rank);
/// `0.4 s`.
std::string describe_seconds(double s);

/// `send(3 f32, tag 7, to rank 0)`.
std::string describe_message(bool is_send, DType dtype, size_t nbytes, int32_t tag, int peer);
/// `rank 1's send(3 f32, tag 7, to rank 0), called at train.py:12 in step,`: the message that
/// failed; empty when the failure was not in a message.
std::string describe_failed_message(const Segment& segment, const Failure& failure);

/// "rank 1 sent 5 f32 with tag 7 and rank 0 receives 4 f32 with it"
std::string describe_message_mismatch(const MessageMismatch& mismatch, int receiver);

}  // namespace pycoll
