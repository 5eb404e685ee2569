// Calls, records and what a rank last did as text, for errors that name both sides.
#pragma once

#include <string>

#include "reduce/dtypes.h"
#include "transport/ring/segment.h"

namespace pycoll {

/// `all_reduce #412`.
std::string describe_operation(const CallRecord& record);
/// `all_reduce(shape (3, 4), dtype f32, op sum) at train.py:12 in step`, as `rank` called it.
std::string describe_call(const Segment& segment, int rank, const CallRecord& record);
/// ` at train.py:12 in step`: where `rank` called that operation; empty when it is not known.
std::string describe_place(const Segment& segment, int rank, uint64_t sequence);
/// `rank 0 called all_reduce(...) and rank 2 called broadcast(...)`, with what their calls have
/// decided where the calls themselves look alike.
std::string describe_difference(const Segment& segment, int first_rank, const CallRecord& first,
                                int second_rank, const CallRecord& second);
/// What `rank` did last, and how long ago: `it finished all_reduce #3 ... 1.2 s ago`.
std::string describe_last(const Segment& segment, int rank);
/// `0.4 s`.
std::string describe_seconds(double s);

/// `send(3 f32, tag 7, to rank 0)`.
std::string describe_message(bool is_send, DType dtype, size_t nbytes, int32_t tag, int peer);
/// `rank 1's send(3 f32, tag 7, to rank 0), called at train.py:12 in step,`: the message that met
/// the failure; empty where it was none.
std::string describe_failed_message(const Segment& segment, const Failure& failure);

/// "rank 1 sent 5 f32 with tag 7 and rank 0 receives 4 f32 with it"
std::string describe_message_mismatch(const MessageMismatch& mismatch, int receiver);

}  // namespace pycoll
