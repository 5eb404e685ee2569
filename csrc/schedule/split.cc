#include "schedule/split.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

namespace pycoll {
namespace {

struct Part {
  Move move;
  int32_t place;  // index among the parts of its move
};

std::vector<Part> cut(std::span<const Move> moves, int32_t chunks) {
  std::vector<Part> parts;
  for (const Move& move : moves) {
    const int32_t last = move.chunks.end();
    int32_t place = 0;
    for (int32_t first = move.chunks.first; first < last; ++place) {
      const int32_t border = std::min((first / chunks + 1) * chunks, last);
      Part part{move, place};
      part.move.chunks = {first, border - first};
      parts.push_back(part);
      first = border;
    }
  }
  return parts;
}

/// Whether the i-th parts of all moves may form consecutive rounds: no rank sends a chunk after one
/// of these rounds has changed it. Otherwise the i-th parts stay in one round.
bool may_follow_by_place(std::span<const Part> parts) {
  std::map<std::pair<int32_t, int32_t>, int32_t> received;  // by rank and chunk: the place
  for (const Part& part : parts) {
    for (int32_t chunk = part.move.chunks.first; chunk < part.move.chunks.end(); ++chunk) {
      received[{part.move.dst, chunk}] = part.place;
    }
  }
  return std::all_of(parts.begin(), parts.end(), [&](const Part& part) {
    for (int32_t chunk = part.move.chunks.first; chunk < part.move.chunks.end(); ++chunk) {
      const auto at = received.find({part.move.src, chunk});
      if (at != received.end() && part.place > at->second) return false;
    }
    return true;
  });
}

}  // namespace

Schedule split_moves(const Schedule& schedule, int32_t chunks, std::vector<int32_t>& rounds) {
  const std::span<const Move> moves(schedule.moves);
  Schedule split = schedule;
  split.moves.clear();
  rounds.clear();
  for (size_t first = 0; first < moves.size();) {
    const int32_t round = moves[first].round;
    size_t last = first;
    while (last < moves.size() && moves[last].round == round) ++last;
    std::vector<Part> parts = cut(moves.subspan(first, last - first), chunks);
    first = last;

    // Each chunk's values depend only on that chunk's moves.
    std::map<int32_t, int32_t> sub_rounds;
    const bool by_place = may_follow_by_place(parts);
    const auto key = [&](const Part& part) {
      return by_place ? part.place : part.move.chunks.first / chunks;
    };
    for (const Part& part : parts) sub_rounds[key(part)] = 0;
    for (auto& [name, number] : sub_rounds) {
      number = static_cast<int32_t>(rounds.size());
      rounds.push_back(round);
    }
    for (Part& part : parts) part.move.round = sub_rounds[key(part)];
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Part& a, const Part& b) { return a.move.round < b.move.round; });
    for (const Part& part : parts) split.moves.push_back(part.move);
  }
  return split;
}

}  // namespace pycoll
