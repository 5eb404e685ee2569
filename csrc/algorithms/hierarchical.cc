// Hierarchical: reduce-scatter inside each host, the collective between the ranks with the same
// place in all hosts, all-gather inside each host.
//
// Cost of all_reduce for m ranks in each of H hosts, with i inside and o outside:
// 2(m-1)(alpha_i + beta_i N/m) + 2(H-1)(alpha_o + beta_o N/(mH)) + ((m-1)/m + (H-1)/(mH)) gamma N.
// A host sends 2(H-1)/H of the message to other hosts, the minimum, and 2(m-1) + 2(H-1) rounds are
// fewer than a flat ring's 2(mH-1). reduce_scatter and all_gather are the halves; there the blocks
// that travel inside a host are not contiguous, so there are H rings, one after another.
// broadcast: the root scatters inside its host, a binomial tree between hosts for each place,
// all-gather inside: alpha (m-1 + lg H + m-1), beta N ((m-1)/m + lg H/m + (m-1)/m). reduce is that
// backwards, with reduce-scatter inside each host; hosts send N to each other H-1 times in all.
// all_to_all: each rank sends all data for another host to the rank of its place there, which
// distributes it inside that host. This takes (H-1) alpha_o instead of pairwise's (n-m) alpha_o,
// the same bytes between hosts, and (m-1)/m of these once more inside, which suits blocks so small
// that alpha_o dominates. Source: P. Goyal et al., "Accurate, large minibatch SGD",
// arXiv:1706.02677 (2017), section 4; M. Cho et al., "BlueConnect: decomposing all-reduce", MLSys
// 2019.
#include "algorithms/hierarchical.h"

#include <functional>
#include <string>
#include <vector>

#include "algorithms/binomial.h"
#include "base/error.h"

namespace pycoll {
namespace {

using Ranks = std::vector<int>;
using Chunks = std::vector<ChunkRange>;
using ChunksOf = std::function<Chunks(int piece)>;

/// Builds schedules for hosts with `places` ranks each: rank = host * places + place.
class Builder {
 public:
  Builder(Collective collective, int num_ranks, int ranks_per_host, int num_chunks, int root)
      : builder_(collective, "hierarchical", num_ranks, num_chunks, root),
        places_(ranks_per_host),
        hosts_(num_ranks / ranks_per_host),
        root_(root) {}

  Schedule all_reduce() {
    // Chunk place * hosts + host: the chunks of a place are contiguous.
    const auto of_place = [&](int place) { return Chunks{{place * hosts_, hosts_}}; };
    const auto of_both = [&](int place, int host) { return Chunks{{place * hosts_ + host}}; };
    scatter(of_place, of_both);
    gather(of_place, of_both);
    return builder_.build();
  }

  /// Block r belongs to rank r, so a place has one block in each host.
  Schedule reduce_scatter() {
    scatter(blocks_of_place(), block());
    return builder_.build();
  }
  Schedule all_gather() {
    gather(blocks_of_place(), block());
    return builder_.build();
  }

  Schedule all_to_all() {
    const int n = hosts_ * places_;
    for (int round = 0; round < hosts_ - 1; ++round) {
      for (int src = 0; src < n; ++src) {
        const int host = (src / places_ + round + 1) % hosts_;
        builder_.copy(round, {src * n + host * places_, places_}, src,
                      host * places_ + src % places_);
      }
    }
    // The blocks of its own host first, then those of the other hosts in the order of arrival.
    round_ = hosts_ - 1;
    for (int way = 0; way < hosts_; ++way) {
      for (int step = 1; step < places_; ++step, ++round_) {
        for (int rank = 0; rank < n; ++rank) {
          const int host = rank / places_;
          const int place = rank % places_;
          const int src = (host - way + hosts_) % hosts_ * places_ + place;
          const int dst = host * places_ + (place + step) % places_;
          builder_.copy(round_, {src * n + dst}, rank, dst);
        }
      }
    }
    return builder_.build();
  }

  Schedule broadcast() {
    const int root_host = root_ / places_;
    for (int place = 0; place < places_; ++place) {
      const int rank = root_host * places_ + place;
      if (rank != root_) builder_.copy(0, {place}, root_, rank);
    }
    for_each_binomial_edge(hosts_, root_host, [&](int round, int parent, int child) {
      for (int place = 0; place < places_; ++place) {
        builder_.copy(1 + round, {place}, parent * places_ + place, child * places_ + place);
      }
    });
    round_ = 1 + num_binomial_rounds(hosts_);
    full_ = root_;
    for_each_host([&](const Ranks& ranks) {
      ring_all_gather(ranks, [](int place) { return Chunks{{place}}; });
    });
    return builder_.build();
  }

  Schedule reduce() {
    for_each_host([&](const Ranks& ranks) {
      ring_reduce_scatter(ranks, [](int place) { return Chunks{{place}}; });
    });
    const int root_host = root_ / places_;
    const int last_round = places_ - 1 + num_binomial_rounds(hosts_);
    for_each_binomial_edge(hosts_, root_host, [&](int round, int parent, int child) {
      for (int place = 0; place < places_; ++place) {
        builder_.reduce(last_round - 1 - round, {place}, child * places_ + place,
                        parent * places_ + place);
      }
    });
    for (int place = 0; place < places_; ++place) {
      const int rank = root_host * places_ + place;
      if (rank != root_) builder_.copy(last_round, {place}, rank, root_);
    }
    return builder_.build();
  }

 private:
  using OfPlace = std::function<Chunks(int place)>;
  using OfBoth = std::function<Chunks(int place, int host)>;

  OfPlace blocks_of_place() const {
    return [this](int place) {
      Chunks blocks;
      for (int host = 0; host < hosts_; ++host) blocks.push_back({host * places_ + place});
      return blocks;
    };
  }
  OfBoth block() const {
    return [this](int place, int host) { return Chunks{{host * places_ + place}}; };
  }

  void scatter(const OfPlace& of_place, const OfBoth& of_both) {
    for_each_host([&](const Ranks& ranks) { ring_reduce_scatter(ranks, of_place); });
    round_ += (places_ - 1) * static_cast<int>(of_place(0).size());
    for_each_place([&](const Ranks& ranks, int place) {
      ring_reduce_scatter(ranks, [&](int host) { return of_both(place, host); });
    });
    round_ += hosts_ - 1;
  }
  void gather(const OfPlace& of_place, const OfBoth& of_both) {
    for_each_place([&](const Ranks& ranks, int place) {
      ring_all_gather(ranks, [&](int host) { return of_both(place, host); });
    });
    round_ += hosts_ - 1;
    for_each_host([&](const Ranks& ranks) { ring_all_gather(ranks, of_place); });
  }

  template <typename Visit>
  void for_each_host(Visit visit) {
    for (int host = 0; host < hosts_; ++host) {
      Ranks ranks;
      for (int place = 0; place < places_; ++place) ranks.push_back(host * places_ + place);
      visit(ranks);
    }
  }
  template <typename Visit>
  void for_each_place(Visit visit) {
    for (int place = 0; place < places_; ++place) {
      Ranks ranks;
      for (int host = 0; host < hosts_; ++host) ranks.push_back(host * places_ + place);
      visit(ranks, place);
    }
  }

  /// Piece p starts at member p + 1 and is complete when it has gone around to member p.
  void ring_reduce_scatter(const Ranks& ranks, const ChunksOf& chunks_of) {
    const int n = static_cast<int>(ranks.size());
    for (int i = 0; i < n; ++i) {
      for_each_round(
          n, [&](int piece) { return chunks_of((i - 1 - piece + n) % n); },
          [&](int round, ChunkRange chunks) {
            builder_.reduce(round, chunks, ranks[i], ranks[(i + 1) % n]);
          });
    }
  }
  /// Piece p starts at member p.
  void ring_all_gather(const Ranks& ranks, const ChunksOf& chunks_of) {
    const int n = static_cast<int>(ranks.size());
    for (int i = 0; i < n; ++i) {
      const int next = ranks[(i + 1) % n];
      if (next == full_) continue;
      for_each_round(
          n, [&](int piece) { return chunks_of((i - piece + n) % n); },
          [&](int round, ChunkRange chunks) { builder_.copy(round, chunks, ranks[i], next); });
    }
  }
  /// Sends each of a piece's ranges around its own ring, one ring after another: together they
  /// would need a slot each.
  template <typename ChunksIn, typename Visit>
  void for_each_round(int n, ChunksIn chunks_in, Visit visit) {
    for (int round = 0; round < n - 1; ++round) {
      const Chunks chunks = chunks_in(round);
      for (int i = 0; i < static_cast<int>(chunks.size()); ++i) {
        visit(round_ + i * (n - 1) + round, chunks[i]);
      }
    }
  }

  ScheduleBuilder builder_;
  const int places_;
  const int hosts_;
  const int root_;
  int round_ = 0;
  int full_ = -1;  // a rank that has everything and takes no copies
};

}  // namespace

bool has_hierarchical(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
    case Collective::kAllGather:
    case Collective::kAllToAll:
    case Collective::kBroadcast:
    case Collective::kReduce:
      return true;
    default:
      return false;
  }
}

Schedule hierarchical(Collective collective, int num_ranks, int ranks_per_host, int root) {
  if (num_ranks < 1 || ranks_per_host < 1 || num_ranks % ranks_per_host != 0) {
    throw UsageError("hierarchical: hosts of " + std::to_string(ranks_per_host) +
                     " ranks do not make " + std::to_string(num_ranks) + " ranks");
  }
  const auto builder = [&](int num_chunks) {
    return Builder(collective, num_ranks, ranks_per_host, num_chunks, root);
  };
  switch (collective) {
    case Collective::kAllReduce:
      return builder(num_ranks).all_reduce();
    case Collective::kReduceScatter:
      return builder(num_ranks).reduce_scatter();
    case Collective::kAllGather:
      return builder(num_ranks).all_gather();
    case Collective::kBroadcast:
      return builder(ranks_per_host).broadcast();
    case Collective::kReduce:
      return builder(ranks_per_host).reduce();
    case Collective::kAllToAll:
      return builder(num_ranks * num_ranks).all_to_all();
    default:
      throw UsageError(
          std::string("no hierarchical schedule for ") + std::string(info(collective).name) +
          ": expected all_reduce, reduce_scatter, all_gather, all_to_all, broadcast or reduce");
  }
}

}  // namespace pycoll
