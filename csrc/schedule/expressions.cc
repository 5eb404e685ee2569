#include "schedule/expressions.h"

namespace pycoll {

std::optional<Value> Expressions::combine(const std::vector<Value>& operands, bool final) {
  if (operands.size() == 1 && !final) return operands[0];
  std::vector<int32_t> key = operands;
  key.push_back(final ? -2 : -1);
  const auto next =
      static_cast<Value>(static_cast<size_t>(num_ranks_ * num_chunks_) + nodes_.size());
  const auto [at, is_new] = ids_.try_emplace(std::move(key), next);
  if (!is_new) return at->second;

  std::vector<uint64_t> sum(num_words_);
  bool is_counted_twice = false;
  for (Value operand : operands) {
    if (is_start(operand)) {
      const int rank = start_rank(operand);
      const uint64_t bit = uint64_t{1} << (rank % 64);
      is_counted_twice |= (sum[rank / 64] & bit) != 0;
      sum[rank / 64] |= bit;
      continue;
    }
    for (size_t word = 0; word < num_words_; ++word) {
      const uint64_t bits = contributors_[index(operand) * num_words_ + word];
      is_counted_twice |= (sum[word] & bits) != 0;
      sum[word] |= bits;
    }
  }
  if (is_counted_twice) {
    ids_.erase(at);
    return std::nullopt;
  }
  nodes_.push_back(describe(operands, final));
  contributors_.insert(contributors_.end(), sum.begin(), sum.end());
  return next;
}

Expressions::Node Expressions::describe(const std::vector<Value>& operands, bool final) const {
  Node made{final, num_in_fold(operands[0]), false};
  made.flat = made.num_in_fold == 1 || (operands.size() == 1 && order(operands[0]) == Order::kFlat);
  for (size_t i = 1; i < operands.size(); ++i) {
    const bool continues = made.num_in_fold != 0 && is_start(operands[i]) &&
                           start_rank(operands[i]) == made.num_in_fold;
    made.num_in_fold = continues ? made.num_in_fold + 1 : 0;
  }
  return made;
}

Order Expressions::order(Value value) const {
  if (num_in_fold(value) == 0) return Order::kOther;
  return is_start(value) || node(value).flat ? Order::kFlat : Order::kLeftFold;
}

int Expressions::first_missing(Value value, int count) const {
  for (int rank = 0; rank < count; ++rank) {
    if (!has_contributed(value, rank)) return rank;
  }
  return -1;
}

int Expressions::first_beyond(Value value, int count) const {
  for (int rank = count; rank < num_ranks_; ++rank) {
    if (has_contributed(value, rank)) return rank;
  }
  return -1;
}

bool Expressions::has_contributed(Value value, int rank) const {
  if (is_start(value)) return start_rank(value) == rank;
  const uint64_t word = contributors_[index(value) * num_words_ + static_cast<size_t>(rank) / 64];
  return (word >> (rank % 64) & 1) != 0;
}

int Expressions::num_in_fold(Value value) const {
  if (is_start(value)) return start_rank(value) == 0 ? 1 : 0;
  return node(value).num_in_fold;
}

}  // namespace pycoll
