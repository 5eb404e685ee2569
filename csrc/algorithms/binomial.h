// The binomial tree: in round k, the 2^k ranks nearest to the root each reach one more rank.
#pragma once

#include <bit>

namespace pycoll {

/// Rounds in which a binomial tree reaches n ranks: ceil(lg n).
inline int num_binomial_rounds(int num_ranks) {
  return std::bit_width(static_cast<unsigned>(num_ranks - 1));
}

/// Calls visit(round, parent, child) for every edge, in the order of a broadcast from `root`.
template <typename Visit>
void for_each_binomial_edge(int num_ranks, int root, Visit visit) {
  for (int round = 0; round < num_binomial_rounds(num_ranks); ++round) {
    const int reached = 1 << round;
    for (int place = 0; place < reached && place + reached < num_ranks; ++place) {
      visit(round, (root + place) % num_ranks, (root + place + reached) % num_ranks);
    }
  }
}

}  // namespace pycoll
