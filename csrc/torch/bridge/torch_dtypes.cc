#include "torch/bridge/torch_dtypes.h"

#include <ATen/ATen.h>

#include "torch/bridge/core.h"

namespace pycoll::torch_backend {
namespace {

const char* name_of(c10d::ReduceOp::RedOpType op) {
  constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                                    "BAND", "BOR", "BXOR",    "PREMUL_SUM", "UNUSED"};
  return kNames[std::min<size_t>(op, std::size(kNames) - 1)];
}

int op_of(c10d::ReduceOp::RedOpType op) {
  using enum c10d::ReduceOp::RedOpType;
  switch (op) {
    case SUM:
      return PYCOLL_SUM;
    case AVG:
      return PYCOLL_AVG;
    case PRODUCT:
      return PYCOLL_PROD;
    case MIN:
      return PYCOLL_MIN;
    case MAX:
      return PYCOLL_MAX;
    case BAND:
      return PYCOLL_BAND;
    case BOR:
      return PYCOLL_BOR;
    case BXOR:
      return PYCOLL_BXOR;
    case PREMUL_SUM:
      return PYCOLL_PREMUL;
    default:
      return -1;
  }
}

double factor_of(const c10d::ReduceOp& op) {
  const auto* supplement = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr,
                    "pycoll: PREMUL_SUM has no factor: make it with "
                    "torch.distributed._make_nccl_premul_sum(factor)");
  if (!supplement->tensor_factor.defined()) return supplement->double_factor;
  return supplement->tensor_factor.item<double>();
}

}  // namespace

int dtype_of(at::ScalarType type) {
  using enum at::ScalarType;
  switch (type) {
    case Float:
      return PYCOLL_F32;
    case Double:
      return PYCOLL_F64;
    case Half:
      return PYCOLL_F16;
    case BFloat16:
      return PYCOLL_BF16;
    case Float8_e4m3fn:
      return PYCOLL_F8_E4M3;
    case Float8_e5m2:
      return PYCOLL_F8_E5M2;
    case Char:
      return PYCOLL_I8;
    case Short:
      return PYCOLL_I16;
    case Int:
      return PYCOLL_I32;
    case Long:
      return PYCOLL_I64;
    case Byte:
      return PYCOLL_U8;
    case UInt16:
      return PYCOLL_U16;
    case UInt32:
      return PYCOLL_U32;
    case UInt64:
      return PYCOLL_U64;
    case Bool:
      return PYCOLL_BOOL;
    case ComplexFloat:
      return PYCOLL_C64;
    case ComplexDouble:
      return PYCOLL_C128;
    default:
      return PYCOLL_OPAQUE;
  }
}

Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType type, const char* what) {
  Reduction reduction{.op = op_of(op.op_)};
  // Integers have no exact mean; torch's other backends refuse it, or round differently.
  const bool inexact = reduction.op == PYCOLL_AVG && at::isIntegralType(type, true);
  TORCH_CHECK_VALUE(
      !inexact, "pycoll: ", what, " with ReduceOp.AVG of ", type,
      ": the mean of integers is not an integer; reduce with SUM and divide, or convert "
      "to a floating point type");
  TORCH_CHECK_VALUE(reduction.op >= 0 && core().reduces(dtype_of(type), reduction.op) != 0,
                    "pycoll: ", what, " with ReduceOp.", name_of(op.op_), " of ", type,
                    ": this op does not support elements of this type");
  if (reduction.op == PYCOLL_PREMUL) reduction.factor = factor_of(op);
  return reduction;
}

}  // namespace pycoll::torch_backend
