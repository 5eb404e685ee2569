#include "schedule/script.h"

#include <algorithm>

namespace pycoll {
namespace {

std::vector<int32_t> ranks_in(const Program& program, uint64_t mask) {
  std::vector<int32_t> ranks;
  for (size_t i = 0; i < program.peers.size(); ++i) {
    if ((mask >> i & 1) != 0) ranks.push_back(program.peers[i]);
  }
  return ranks;
}

}  // namespace

int64_t Script::num_steps() const {
  int64_t sum = 0;
  for (const ScriptLoop& loop : loops) sum += loop.count * loop.num_steps;
  return sum;
}

void Script::add(std::span<const int32_t> srcs, std::span<const int32_t> dsts, bool reads_local,
                 double fraction) {
  if (!is_looping_) loops.push_back({static_cast<int32_t>(steps.size()), 0, 1});
  ++loops.back().num_steps;
  ScriptStep step;
  step.first_peer = static_cast<int32_t>(peers.size());
  step.num_srcs = static_cast<int32_t>(srcs.size());
  step.num_dsts = static_cast<int32_t>(dsts.size());
  // The first operand costs nothing: local chunks, or else the first source.
  step.num_combined = std::max(0, step.num_srcs - (reads_local ? 0 : 1));
  step.fraction = fraction;
  steps.push_back(step);
  peers.insert(peers.end(), srcs.begin(), srcs.end());
  peers.insert(peers.end(), dsts.begin(), dsts.end());
}

void Script::begin_loop(int64_t count) {
  loops.push_back({static_cast<int32_t>(steps.size()), 0, count});
  is_looping_ = true;
}

void Script::end_loop() {
  is_looping_ = false;
  if (loops.back().count > 0 && loops.back().num_steps > 0) return;
  steps.resize(static_cast<size_t>(loops.back().first_step));
  loops.pop_back();
}

void Script::append(const Script& other, std::span<const int32_t> rank_of, double scale) {
  const auto first_step = static_cast<int32_t>(steps.size());
  const auto first_peer = static_cast<int32_t>(peers.size());
  for (ScriptLoop loop : other.loops) {
    loop.first_step += first_step;
    loops.push_back(loop);
  }
  for (ScriptStep step : other.steps) {
    step.first_peer += first_peer;
    step.fraction *= scale;
    steps.push_back(step);
  }
  for (int32_t rank : other.peers) peers.push_back(rank_of[static_cast<size_t>(rank)]);
}

Script script_of(const Program& program) {
  Script script;
  const double pieces = program.num_chunks / program.num_blocks;
  for (const Step& step : program.steps) {
    const std::vector<int32_t> srcs = ranks_in(program, step.src_peers);
    std::vector<int32_t> dsts = ranks_in(program, step.dst_peers);
    const int32_t n = program.num_ranks;
    const auto distance = [&](int32_t dst) { return (dst - program.rank + n) % n; };
    std::sort(dsts.begin(), dsts.end(),
              [&](int32_t a, int32_t b) { return distance(a) < distance(b); });
    script.add(srcs, dsts, step.has(kReadLocal),
               step.num_chunks / (pieces * program.blocks_per_payload));
  }
  return script;
}

}  // namespace pycoll
