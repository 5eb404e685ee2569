#include "reduce/cells.h"

#include <cmath>

#include "base/error.h"

namespace pycoll {
namespace {

/// Whether a factor that is a whole number can be represented in this integer dtype.
bool holds(DType dtype, double factor) {
  const bool is_signed = dtype_kind(dtype) == DTypeKind::kInt;
  const double limit = std::ldexp(1.0, static_cast<int>(8 * dtype_size(dtype)) - is_signed);
  return factor < limit && factor >= (is_signed ? -limit : 0);
}

template <class Row>
std::string names(int num_rows, std::string_view (*name)(Row)) {
  std::string all;
  for (int i = 0; i < num_rows; ++i) {
    all += (i == 0 ? "" : ", ") + std::string(name(static_cast<Row>(i)));
  }
  return all;
}

}  // namespace

std::string_view why_unsupported(DType dtype, Op op) {
  if (supported(dtype, op)) return "";
  if (dtype == DType::kOpaque) return "pycoll can copy elements of this dtype, not reduce them";
  switch (dtype_kind(dtype)) {
    case DTypeKind::kFloat:
      return "it needs integer or bool elements, and these are floating-point numbers; to work on "
             "their bits, view them as integers of the same size";
    case DTypeKind::kComplex:
      if (!is_bitwise(op)) return "complex numbers have no order";
      return "it needs integer or bool elements, and these are complex numbers; to work on their "
             "bits, view them as integers";
    case DTypeKind::kBool:
      if (op == Op::kAvg) {
        return "truth values have no average: convert them to numbers, or use band (all) or bor "
               "(any)";
      }
      return "truth values cannot be scaled: convert them to numbers";
    default:
      return "";
  }
}

void check_op(DType dtype, Op op) {
  if (supported(dtype, op)) return;
  if (dtype == DType::kOpaque) {
    throw UsageError(std::string(op_name(op)) + " cannot reduce elements of this dtype: expected " +
                     "one of " + dtype_names());
  }
  throw UsageError("op " + std::string(op_name(op)) + " does not go with dtype " +
                   std::string(dtype_name(dtype)) + ": " + std::string(why_unsupported(dtype, op)));
}

void check_premul_factor(DType dtype, double factor) {
  check_op(dtype, Op::kPremul);
  const DTypeKind kind = dtype_kind(dtype);
  if (kind != DTypeKind::kInt && kind != DTypeKind::kUInt) return;
  if (factor == std::trunc(factor) && holds(dtype, factor)) return;
  std::string text = std::to_string(factor);
  throw UsageError("premul multiplies " + std::string(dtype_name(dtype)) +
                   " elements by a factor of their own dtype: expected a whole number that " +
                   std::string(dtype_name(dtype)) + " holds, got " + text);
}

std::string elements_text(DType dtype, uint64_t nbytes) {
  if (dtype == DType::kOpaque) return std::to_string(nbytes) + " opaque bytes";
  return std::to_string(nbytes / dtype_size(dtype)) + " " + std::string(dtype_name(dtype));
}

std::string dtype_names() { return names(kNumDTypes, dtype_name); }
std::string op_names() { return names(kNumOps, op_name); }

}  // namespace pycoll
