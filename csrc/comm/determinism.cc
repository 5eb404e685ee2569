#include "comm/determinism.h"

namespace pycoll {

Order order_needed(const Call& call) {
  if (!call.deterministic || !info(call.collective).has_op) return Order::kOther;
  // These have one result in whatever order.
  if (call.op == Op::kMin || call.op == Op::kMax) return Order::kOther;
  const DTypeKind kind = dtype_kind(call.dtype);
  if (kind != DTypeKind::kFloat && kind != DTypeKind::kComplex) return Order::kOther;
  // Small floats are accumulated in f32: several steps would round several times.
  return dtype_size(call.dtype) < sizeof(float) ? Order::kFlat : Order::kLeftFold;
}

}  // namespace pycoll
