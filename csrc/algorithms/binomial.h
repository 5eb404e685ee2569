// Binomial trees, over places counted from the root: place p is rank (root + p) mod n.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "schedule/move.h"

namespace pycoll {

/// Number of rounds in which a binomial tree reaches n ranks: ceil(lg n).
inline int num_binomial_rounds(int num_ranks) {
  return std::bit_width(static_cast<unsigned>(num_ranks - 1));
}

/// Visits the tree in whose round k each of the 2^k places nearest to the root reaches one more, so
/// that every rank with the message works in every round. Calls visit(round, parent, child), with
/// ranks, in the order of a broadcast from `root`.
template <typename Visit>
void for_each_binomial_edge(int num_ranks, int root, Visit visit) {
  for (int round = 0; round < num_binomial_rounds(num_ranks); ++round) {
    const int reached = 1 << round;
    for (int place = 0; place < reached && place + reached < num_ranks; ++place) {
      visit(round, (root + place) % num_ranks, (root + place + reached) % num_ranks);
    }
  }
}

/// Size of the subtree below `place`, in the tree whose subtrees are runs of places p, p + 1, ....
inline int subtree_size(int num_ranks, int place) {
  return place == 0 ? num_ranks : std::min(place & -place, num_ranks - place);
}

/// Calls visit(round, parent, child), with places, for every edge of that tree, in the order of a
/// scatter: the distant half first.
template <typename Visit>
void for_each_subtree_edge(int num_ranks, Visit visit) {
  const int num_rounds = num_binomial_rounds(num_ranks);
  for (int round = 0; round < num_rounds; ++round) {
    const int distance = 1 << (num_rounds - 1 - round);
    for (int place = 0; place + distance < num_ranks; place += 2 * distance) {
      visit(round, place, place + distance);
    }
  }
}

/// Chunks [first, first + count) modulo n: one range, or two when they wrap around.
inline std::vector<ChunkRange> wrapped(int first, int count, int n) {
  first %= n;
  if (first + count <= n) return {{first, count}};
  return {{first, n - first}, {0, first + count - n}};
}

}  // namespace pycoll
