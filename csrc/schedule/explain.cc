#include "schedule/explain.h"

#include <cstdio>

namespace pycoll {
namespace {

std::string chunks_text(const ChunkRange& chunks) {
  if (chunks.count == 1) return "chunk " + std::to_string(chunks.first);
  const int64_t last = int64_t{chunks.first} + chunks.count - 1;
  return "chunks " + std::to_string(chunks.first) + ".." + std::to_string(last);
}

/// `1 step`, `2 steps`.
std::string count_text(size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

void append(std::string& list, const char* separator, const std::string& item) {
  if (!list.empty()) list += separator;
  list += item;
}

/// `rank 0, self, rank 2`: ascending ranks, the order in which sources are combined.
std::string ends_text(const Program& program, uint64_t mask, bool local) {
  std::string text;
  const int num_peers = static_cast<int>(program.peers.size());
  for (int i = 0; i <= num_peers; ++i) {
    if (local && i == program.self_position) append(text, ", ", "self");
    if (i < num_peers && (mask >> i & 1) != 0) {
      append(text, ", ", "rank " + std::to_string(program.peers[i]));
    }
  }
  return text;
}

std::string verb_text(const Step& step) {
  std::string verb;
  const bool sends = step.dst_peers != 0;
  if (step.src_peers != 0) append(verb, "-", "recv");
  const bool several = (step.src_peers & (step.src_peers - 1)) != 0;
  if (several || (step.src_peers != 0 && step.has(kReadLocal))) append(verb, "-", "reduce");
  if (step.has(kWriteLocal) && (sends || step.src_peers == 0)) append(verb, "-", "copy");
  if (sends) append(verb, "-", step.has(kMulticastDst) ? "multicast" : "send");
  return verb;
}

}  // namespace

std::string explain_step(const Program& program, const Step& step) {
  std::string text = verb_text(step) + " " + chunks_text(step.chunks());
  if (step.src_peers != 0) {
    text += ": " + ends_text(program, step.src_peers, step.has(kReadLocal));
    if (step.has(kMulticastSrc)) text += " (multicast)";
  }
  text += " -> " + ends_text(program, step.dst_peers, step.has(kWriteLocal));
  if (step.has(kFinal)) text += " [final]";
  return text;
}

std::string explain(const Schedule& schedule, const std::vector<Program>& programs) {
  const CollectiveInfo& row = info(schedule.collective);
  std::string text = std::string(row.name) + " " + schedule.algorithm + ": " +
                     count_text(static_cast<size_t>(schedule.num_ranks), "rank") + ", " +
                     count_text(static_cast<size_t>(schedule.num_chunks), "chunk") + ", ";
  if (row.has_root) text += "root " + std::to_string(schedule.root) + ", ";
  text += count_text(schedule.moves.size(), "move") + "\n";
  for (const Program& program : programs) {
    text += "\nrank " + std::to_string(program.rank) + ": " +
            count_text(program.steps.size(), "step") + "\n";
    for (size_t i = 0; i < program.steps.size(); ++i) {
      // A step of the phase of the step before it has a bar behind its number.
      char place[48];
      std::snprintf(place, sizeof place, "%4zu%s round %-3d ", i,
                    program.steps[i].has(kSamePhase) ? "|" : " ", program.steps[i].round);
      text += place + explain_step(program, program.steps[i]) + "\n";
    }
  }
  return text;
}

}  // namespace pycoll
