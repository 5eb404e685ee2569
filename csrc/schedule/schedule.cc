#include "schedule/schedule.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/error.h"

namespace pycoll {
namespace {

std::string title(const Schedule& schedule) {
  return std::string(info(schedule.collective).name) + " " + schedule.algorithm;
}

void check_move(const Schedule& schedule, const Move& move) {
  const auto is_rank = [&](int32_t rank) { return rank >= 0 && rank < schedule.num_ranks; };
  const char* problem = nullptr;
  if (move.round < 0) problem = "rounds are counted from 0";
  if (!is_rank(move.src) || !is_rank(move.dst)) problem = "there is no such rank";
  if (move.src == move.dst) problem = "a move joins two different ranks";
  // Compares without an addition, so that no value can overflow.
  if (move.chunks.first < 0 || move.chunks.count < 1 ||
      move.chunks.count > schedule.num_chunks - move.chunks.first) {
    problem = "there are no such chunks";
  }
  if (move.kind == MoveKind::kReduce && !info(schedule.collective).has_op) {
    problem = "this collective has no operator to reduce with";
  }
  if (problem != nullptr) {
    throw UsageError(title(schedule) + ", " + to_string(move) + ": " + problem + " (" +
                     std::to_string(schedule.num_ranks) + " ranks, " +
                     std::to_string(schedule.num_chunks) + " chunks)");
  }
}

/// Checks two moves to the same rank in the same round.
void check_pair(const Schedule& schedule, const Move& a, const Move& b) {
  const char* problem = nullptr;
  if (a.chunks == b.chunks) {
    if (a.kind != b.kind || a.kind == MoveKind::kCopy) {
      problem = "one of them copies, so the result would depend on their order";
    } else if (a.src == b.src) {
      problem = "it is the same move twice";
    }
  } else if (a.chunks.overlaps(b.chunks)) {
    problem = "their chunks overlap without being the same";
  }
  if (problem != nullptr) {
    throw UsageError(title(schedule) + ", " + to_string(b) + " meets " + to_string(a) + ": " +
                     problem);
  }
}

}  // namespace

ScheduleBuilder::ScheduleBuilder(Collective collective, std::string algorithm, int num_ranks,
                                 int num_chunks, int root) {
  schedule_.collective = collective;
  schedule_.algorithm = std::move(algorithm);
  schedule_.num_ranks = num_ranks;
  schedule_.num_chunks = num_chunks;
  schedule_.root = root;
  if (num_ranks < 1) {
    throw UsageError(title(schedule_) + ": expected at least 1 rank, got " +
                     std::to_string(num_ranks));
  }
  if (num_chunks < 1) {
    throw UsageError(title(schedule_) + ": expected at least 1 chunk, got " +
                     std::to_string(num_chunks));
  }
  const int blocks = num_blocks(info(collective).blocks, num_ranks);
  if (num_chunks % blocks != 0) {
    throw UsageError(title(schedule_) + ": expected a multiple of its " + std::to_string(blocks) +
                     " blocks as number of chunks, got " + std::to_string(num_chunks));
  }
  const int num_roots = info(collective).has_root ? num_ranks : 1;
  if (root < 0 || root >= num_roots) {
    throw UsageError(title(schedule_) + ": expected a root from 0 to " +
                     std::to_string(num_roots - 1) + ", got " + std::to_string(root));
  }
}

ScheduleBuilder& ScheduleBuilder::copy(int round, ChunkRange chunks, int src, int dst) {
  return add({round, MoveKind::kCopy, chunks, src, dst});
}

ScheduleBuilder& ScheduleBuilder::reduce(int round, ChunkRange chunks, int src, int dst) {
  return add({round, MoveKind::kReduce, chunks, src, dst});
}

ScheduleBuilder& ScheduleBuilder::add(const Move& move) {
  schedule_.moves.push_back(move);
  return *this;
}

ScheduleBuilder& ScheduleBuilder::without_multicast() {
  schedule_.multicast = false;
  return *this;
}

Schedule ScheduleBuilder::build() {
  for (const Move& move : schedule_.moves) check_move(schedule_, move);
  std::stable_sort(schedule_.moves.begin(), schedule_.moves.end(),
                   [](const Move& a, const Move& b) { return a.round < b.round; });

  // This order puts moves that may conflict next to each other. A range that overlaps any earlier
  // one overlaps the one just before it, or that one has been refused already.
  std::vector<Move> ordered = schedule_.moves;
  const auto key = [](const Move& move) {
    return std::tuple(move.round, move.dst, move.chunks.first, move.chunks.count, move.src);
  };
  std::stable_sort(ordered.begin(), ordered.end(),
                   [&](const Move& a, const Move& b) { return key(a) < key(b); });
  for (size_t i = 1; i < ordered.size(); ++i) {
    const Move& a = ordered[i - 1];
    const Move& b = ordered[i];
    if (a.round == b.round && a.dst == b.dst) check_pair(schedule_, a, b);
  }
  return std::move(schedule_);
}

std::string to_string(const Move& move) {
  const ChunkRange& chunks = move.chunks;
  std::string range = "chunk " + std::to_string(chunks.first);
  if (chunks.count != 1) {
    const int64_t last = int64_t{chunks.first} + chunks.count - 1;
    range = "chunks " + std::to_string(chunks.first) + ".." + std::to_string(last);
  }
  return "round " + std::to_string(move.round) + ": " +
         (move.kind == MoveKind::kReduce ? "reduce " : "copy ") + range + " from rank " +
         std::to_string(move.src) + " to rank " + std::to_string(move.dst);
}

}  // namespace pycoll
