// The table of valid combinations of ops and dtypes. Every cell of dtypes x ops is decided here,
// and each empty cell has a reason.
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

/// The op that combines two elements: sum for avg and premul; for bools, or in place of sum and
/// max, and in place of prod and min, which keeps them 0 or 1.
inline constexpr Op combining_op(DType dtype, Op op) {
  if (op == Op::kAvg || op == Op::kPremul) op = Op::kSum;
  if (dtype != DType::kBool) return op;
  if (op == Op::kSum || op == Op::kMax) return Op::kBor;
  if (op == Op::kProd || op == Op::kMin) return Op::kBand;
  return op;
}

/// The reason why the cell is empty, as half a sentence; empty text if it is not.
std::string_view why_unsupported(DType dtype, Op op);

/// Raises UsageError with the reason if elements of this dtype cannot be reduced with this op.
/// Called before the rank communicates with its peers.
void check_op(DType dtype, Op op);

/// Raises UsageError unless inputs of this dtype can be multiplied by `factor` (premul): integers
/// need a whole number that the dtype can represent.
void check_premul_factor(DType dtype, double factor);

/// "10 f32": the elements of this dtype in `nbytes` bytes, for error messages.
std::string elements_text(DType dtype, uint64_t nbytes);

/// The names of all dtypes, separated by commas, for error messages.
std::string dtype_names();
std::string op_names();

}  // namespace pycoll
