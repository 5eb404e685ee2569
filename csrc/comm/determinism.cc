#include "comm/determinism.h"

namespace pycoll {

Order order_needed(const Call& call) {
  if (!call.deterministic || !info(call.collective).has_op) return Order::kOther;
  // These have one result in whatever order.
  if (call.op == Op::kMin || call.op == Op::kMax) return Order::kOther;
  switch (call.dtype) {
    case DType::kI32:
    case DType::kI64:
    case DType::kU8:
      return Order::kOther;
    default:
      // Small floats are accumulated in f32: several steps would round several times.
      return dtype_size(call.dtype) < sizeof(float) ? Order::kFlat : Order::kLeftFold;
  }
}

}  // namespace pycoll
