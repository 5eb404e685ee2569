// Double binary tree: half of the message goes up and down each of two trees, in pieces.
//
// Cost: about 4 lg n (alpha + beta N/2k) + 4(k-1)(alpha + beta N/2k) + lg n gamma N for k pieces a
// tree. No rank sends more than twice the message, in O(lg n) rounds, which suits many ranks.
// Every rank is an inner node of at most one of the trees, so both use the full bandwidth.
// Source: P. Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast,
// reduction and scan", Parallel Computing 35 (2009).
#include <algorithm>
#include <vector>

#include "algorithms/table/registry.h"

namespace pycoll {
namespace {

constexpr int kPiecesPerTree = 4;

struct Node {
  int parent = -1;
  std::vector<int> children;
  int height = 0;  // 0: a leaf
  int depth = 0;   // 0: the root
};

/// Adds a binary tree over the places [first, last), in order. Left subtrees have an odd size, so
/// inner nodes are only at odd offsets from `first`. Returns the root's place.
int add_subtree(std::vector<Node>& tree, int first, int last, int depth) {
  const int size = last - first;
  const int place = size == 1 ? first : first + (((size - 1) / 2) | 1);
  tree[place].depth = depth;
  const auto add_child = [&](int from, int to) {
    if (from == to) return;
    const int child = add_subtree(tree, from, to, depth + 1);
    tree[child].parent = place;
    tree[place].children.push_back(child);
    tree[place].height = std::max(tree[place].height, tree[child].height + 1);
  };
  add_child(first, place);
  add_child(place + 1, last);
  return place;
}

}  // namespace

Schedule tree_all_reduce(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllReduce, "tree", n, 2 * kPiecesPerTree, root);
  if (n == 1) return builder.build();
  std::vector<Node> tree(n);
  const int top_height = tree[add_subtree(tree, 0, n, 0)].height;
  // The second tree is the first one shifted by one rank: its inner nodes are the first's leaves.
  for (int shift = 0; shift < 2; ++shift) {
    for (int piece = 0; piece < kPiecesPerTree; ++piece) {
      const ChunkRange chunk{shift * kPiecesPerTree + piece};
      for (int place = 0; place < n; ++place) {
        const int rank = (place + shift) % n;
        for (int child_place : tree[place].children) {
          const int child = (child_place + shift) % n;
          // Each piece climbs one round after the piece before it.
          builder.reduce(tree[place].height - 1 + piece, chunk, child, rank);
          builder.copy(top_height + tree[place].depth + piece, chunk, rank, child);
        }
      }
    }
  }
  return builder.build();
}

}  // namespace pycoll
