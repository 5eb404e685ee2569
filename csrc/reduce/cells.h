// Which op goes with which dtype: every cell of the table dtypes x ops is decided here, and each
// empty one says why it is empty.
#pragma once

#include <string>
#include <string_view>

#include "reduce/dtypes.h"
#include "reduce/ops.h"

namespace pycoll {

inline constexpr bool is_bitwise(Op op) {
  return op == Op::kBand || op == Op::kBor || op == Op::kBxor;
}

/// True if elements of this dtype can be reduced with this op.
inline constexpr bool supported(DType dtype, Op op) {
  if (dtype == DType::kOpaque) return false;
  switch (dtype_kind(dtype)) {
    case DTypeKind::kInt:
    case DTypeKind::kUInt:
      return true;
    case DTypeKind::kFloat:
      return !is_bitwise(op);
    case DTypeKind::kComplex:
      return !is_bitwise(op) && op != Op::kMin && op != Op::kMax;
    case DTypeKind::kBool:
      return op != Op::kAvg && op != Op::kPremul;
  }
  return false;
}

/// How two elements are combined: avg and premul as sum; of bools, sum and max as or, prod and min
/// as and, which keeps them 0 or 1.
inline constexpr Op combining_op(DType dtype, Op op) {
  if (op == Op::kAvg || op == Op::kPremul) op = Op::kSum;
  if (dtype != DType::kBool) return op;
  if (op == Op::kSum || op == Op::kMax) return Op::kBor;
  if (op == Op::kProd || op == Op::kMin) return Op::kBand;
  return op;
}

/// Why the cell is empty, as half a sentence; empty text if it is not.
std::string_view why_unsupported(DType dtype, Op op);

/// Raises UsageError that says why, if elements of this dtype cannot be reduced with this op.
/// Called before a rank says anything to the others.
void check_op(DType dtype, Op op);

/// Raises UsageError unless inputs of this dtype can be multiplied by `factor` (premul): integers
/// need a whole number that the dtype holds.
void check_premul_factor(DType dtype, double factor);

/// "10 f32": so many bytes of this dtype, for messages.
std::string elements_text(DType dtype, uint64_t nbytes);

/// The names of all rows, with commas between, for messages.
std::string dtype_names();
std::string op_names();

}  // namespace pycoll
