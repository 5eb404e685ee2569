// THE op table. A new op is one row and one Combine in element.h.
// Integers wrap modulo 2^bits. min and max propagate NaN and order -0 below +0. avg is a sum whose
// last step (kFinal) divides by the number of ranks; for integers the quotient is truncated toward
// zero. A float result that is NaN is the canonical quiet NaN. premul is a sum of inputs that each
// rank multiplies by its own factor (scale_fn, reduce_copy.h) before it sends anything.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace pycoll {

#define PYCOLL_FOR_EACH_OP(X) \
  X(kSum, "sum")              \
  X(kProd, "prod")            \
  X(kMin, "min")              \
  X(kMax, "max")              \
  X(kAvg, "avg")              \
  X(kBand, "band")            \
  X(kBor, "bor")              \
  X(kBxor, "bxor")            \
  X(kPremul, "premul")

enum class Op : uint8_t {
#define X(id, name) id,
  PYCOLL_FOR_EACH_OP(X)
#undef X
};

#define X(id, name) +1
inline constexpr int kNumOps = 0 PYCOLL_FOR_EACH_OP(X);
#undef X

inline constexpr std::string_view op_name(Op op) {
  constexpr std::string_view names[] = {
#define X(id, name) name,
      PYCOLL_FOR_EACH_OP(X)
#undef X
  };
  return names[static_cast<size_t>(op)];
}

/// The op with this name, or nothing.
inline constexpr std::optional<Op> find_op(std::string_view name) {
  for (int o = 0; o < kNumOps; ++o) {
    if (op_name(static_cast<Op>(o)) == name) return static_cast<Op>(o);
  }
  return std::nullopt;
}

}  // namespace pycoll
