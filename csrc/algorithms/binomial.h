// Binomial trees, over places counted from the root: place p is rank (root + p) mod n.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "schedule/move.h"

namespace pycoll {

/// Rounds in which a binomial tree reaches n ranks: ceil(lg n).
inline int num_binomial_rounds(int num_ranks) {
  return std::bit_width(static_cast<unsigned>(num_ranks - 1));
}

/// The tree whose round k lets the 2^k places nearest to the root each reach one more: who has the
/// message works in every round. Calls visit(round, parent, child), ranks, in the order of a
/// broadcast from `root`.
template <typename Visit>
void for_each_binomial_edge(int num_ranks, int root, Visit visit) {
  for (int round = 0; round < num_binomial_rounds(num_ranks); ++round) {
    const int reached = 1 << round;
    for (int place = 0; place < reached && place + reached < num_ranks; ++place) {
      visit(round, (root + place) % num_ranks, (root + place + reached) % num_ranks);
    }
  }
}

/// The tree whose subtrees are runs of places: below place p stand p, p + 1, ..., so many.
inline int subtree_size(int num_ranks, int place) {
  return place == 0 ? num_ranks : std::min(place & -place, num_ranks - place);
}

/// Calls visit(round, parent, child), places, for every edge of that tree, in the order of a
/// scatter: the far half first.
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
