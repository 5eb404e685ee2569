#include "comm/normalized_call.h"

#include "comm/runner.h"
#include "reduce/reduce_copy.h"

namespace pycoll {

const Call& NormalizedCall::prepare(const Call& call, int rank, int num_ranks, const Room& room) {
  plain_ = call;
  if (call.dtype == DType::kOpaque) count_bytes(num_ranks);
  if (call.op == Op::kPremul) find_room(call, rank, num_ranks, room);
  return plain_;
}

void NormalizedCall::count_bytes(int num_ranks) {
  const auto size = static_cast<int64_t>(plain_.element_size);
  const auto in_bytes = [&](const int64_t*& counts, std::vector<int64_t>& own) {
    if (counts == nullptr) return;
    own.assign(counts, counts + num_ranks);
    for (int64_t& count : own) count *= size;
    counts = own.data();
  };
  plain_.dtype = DType::kU8;
  plain_.count *= size;
  in_bytes(plain_.block_counts, block_counts_);
  in_bytes(plain_.send_counts, send_counts_);
  in_bytes(plain_.recv_counts, recv_counts_);
}

void NormalizedCall::find_room(const Call& call, int rank, int num_ranks, const Room& room) {
  plain_.op = Op::kSum;
  scaled_count_ = input_count(call, rank, num_ranks);
  // An in-place array, and an output as large as the input, are overwritten anyway.
  if (call.input == call.output || call.collective == Collective::kAllReduce) {
    scaled_ = call.output;
  } else {
    const size_t needed = static_cast<size_t>(scaled_count_) * dtype_size(call.dtype);
    if (!room && needed > room_bytes_) {
      room_.reset(new std::byte[needed]);
      room_bytes_ = needed;
    }
    scaled_ = room ? room(needed) : room_.get();
  }
  plain_.input = scaled_;
}

void NormalizedCall::scale_input(const Call& call) const {
  if (call.op != Op::kPremul) return;
  scale_fn(call.dtype)(scaled_, call.input, static_cast<size_t>(scaled_count_), call.factor);
}

Order order_needed(const Call& call) {
  if (!call.deterministic || !info(call.collective).has_op) return Order::kOther;
  // The result of min and max does not depend on the order.
  if (call.op == Op::kMin || call.op == Op::kMax) return Order::kOther;
  const DTypeKind kind = dtype_kind(call.dtype);
  if (kind != DTypeKind::kFloat && kind != DTypeKind::kComplex) return Order::kOther;
  // Small floats are accumulated in f32, and several steps would round several times.
  return dtype_size(call.dtype) < sizeof(float) ? Order::kFlat : Order::kLeftFold;
}

}  // namespace pycoll
