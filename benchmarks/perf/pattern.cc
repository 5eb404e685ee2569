#include "perf/pattern.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "reduce/conversion.h"
#include "reduce/reduce_copy.h"

namespace pycoll::perf {
namespace {

constexpr int kNumValues = 4;

/// A small integer as an element of a dtype; the second part of a complex one is 0.
template <DType dtype>
std::vector<std::byte> encode_as(int value) {
  using Traits = DTypeTraits<dtype>;
  typename Traits::Storage stored{};
  if constexpr (dtype_kind(dtype) == DTypeKind::kComplex) {
    stored.re = static_cast<decltype(stored.re)>(value);
  } else {
    if (dtype == DType::kBool) value %= 2;
    stored = Traits::store(static_cast<typename Traits::Acc>(value));
  }
  std::vector<std::byte> bytes(sizeof(stored));
  std::memcpy(bytes.data(), &stored, sizeof(stored));
  return bytes;
}

std::vector<std::byte> encode(DType dtype, int value) {
  switch (dtype) {
#define X(id, name, kind, type, acc) \
  case DType::id:                    \
    return encode_as<DType::id>(value);
    PYCOLL_FOR_EACH_DTYPE(X)
#undef X
    case DType::kOpaque:
      break;
  }
  throw UsageError("opaque elements have no values");
}

/// Numbers that look random, from small ones.
uint32_t mix(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t h = a * 0x9e3779b1u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u;
  h ^= h >> 15;
  h *= 0x2c1b3c6du;
  return h ^ h >> 13;
}

using BlockOf = int (*)(const BlockAt& at);

int num_blocks_in(BlockOf block_of, const CollectiveInfo& collective, int rank, int num_ranks,
                  int root) {
  int most = 0;
  for (int block = 0; block < num_blocks(collective.blocks, num_ranks); ++block) {
    most = std::max(most, block_of({rank, block, num_ranks, root}) + 1);
  }
  return most;
}

}  // namespace

int num_input_blocks(const CollectiveInfo& collective, int rank, int num_ranks, int root) {
  return num_blocks_in(collective.input_block, collective, rank, num_ranks, root);
}

int num_output_blocks(const CollectiveInfo& collective, int rank, int num_ranks, int root) {
  return num_blocks_in(collective.output_block, collective, rank, num_ranks, root);
}

Pattern::Pattern(const CollectiveInfo& collective, DType dtype, Op op, int root, int num_ranks)
    : collective_(collective), dtype_(dtype), op_(op), root_(root), num_ranks_(num_ranks) {
  for (int value = 0; value < kNumValues; ++value) values_.push_back(encode(dtype, value));
  if (collective.has_op) reduce_copy_fn(dtype, op);
}

Pattern::Bytes Pattern::brought(int rank, int block) const {
  // Products of 1 and 2 are exact; and no sum of 8-bit floats may pass what they hold exactly.
  const bool narrow = dtype_size(dtype_) == 1;
  const uint32_t base = op_ == Op::kProd ? 1 : 0;
  const uint32_t range = op_ == Op::kProd || narrow ? 2 : kNumValues;
  const size_t size = dtype_size(dtype_);
  Bytes bytes(kPeriod * size);
  for (uint32_t i = 0; i < kPeriod; ++i) {
    const uint32_t at = mix(i, static_cast<uint32_t>(rank) + 1, static_cast<uint32_t>(block) + 1);
    std::memcpy(&bytes[i * size], values_[base + (at >> 8) % range].data(), size);
  }
  return bytes;
}

Pattern::Bytes Pattern::reduced(int num_ranks, int block) const {
  std::vector<Bytes> sources;
  for (int rank = 0; rank < num_ranks; ++rank) sources.push_back(brought(rank, block));
  std::vector<const void*> srcs;
  for (const Bytes& source : sources) srcs.push_back(source.data());
  Bytes result(sources[0].size());
  void* const dst = result.data();
  const int64_t divisor = op_ == Op::kAvg ? num_ranks : 1;
  reduce_copy_fn(dtype_, op_)({srcs.data(), num_ranks, &dst, 1, kPeriod, divisor, false});
  return result;
}

void Pattern::fill_input(int rank, void* input, int64_t count) const {
  const int64_t size = static_cast<int64_t>(dtype_size(dtype_));
  for (int block = 0; block < num_blocks(collective_.blocks, num_ranks_); ++block) {
    const BlockAt at{rank, block, num_ranks_, root_};
    const int place = collective_.input_block(at);
    if (place == kNoBlock) continue;
    const Bytes bytes = brought(rank, block);
    std::byte* const begin = static_cast<std::byte*>(input) + place * count * size;
    for (int64_t i = 0; i < count; i += kPeriod) {
      std::memcpy(begin + i * size, bytes.data(), std::min(kPeriod, count - i) * size);
    }
  }
}

int64_t Pattern::count_wrong(int rank, const void* output, int64_t count) const {
  const int64_t size = static_cast<int64_t>(dtype_size(dtype_));
  int64_t num_wrong = 0;
  for (int block = 0; block < num_blocks(collective_.blocks, num_ranks_); ++block) {
    const BlockAt at{rank, block, num_ranks_, root_};
    const Goal goal = collective_.goal(at);
    if (goal.kind == Goal::Kind::kAny) continue;
    const Bytes want = goal.kind == Goal::Kind::kStart     ? brought(goal.source, block)
                       : goal.kind == Goal::Kind::kReduced ? reduced(num_ranks_, block)
                       : goal.kind == Goal::Kind::kPrefix  ? reduced(rank + 1, block)
                                                           : reduced(rank, block);
    const std::byte* const begin =
        static_cast<const std::byte*>(output) + collective_.output_block(at) * count * size;
    for (int64_t i = 0; i < count; i += kPeriod) {
      const int64_t num = std::min(kPeriod, count - i);
      if (std::memcmp(begin + i * size, want.data(), num * size) == 0) continue;
      for (int64_t j = 0; j < num; ++j) {
        num_wrong += std::memcmp(begin + (i + j) * size, &want[j * size], size) != 0;
      }
    }
  }
  return num_wrong;
}

}  // namespace pycoll::perf
