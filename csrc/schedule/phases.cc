#include "schedule/phases.h"

#include <algorithm>
#include <span>

namespace pycoll {
namespace {

bool uses_multicast(const Step& step) { return step.has(kMulticastSrc) || step.has(kMulticastDst); }

/// True when the order of the two steps matters to the chunks.
bool share_chunks(const Step& a, const Step& b, PeerBytes peer_bytes) {
  if (!a.chunks().overlaps(b.chunks())) return false;
  return peer_bytes == PeerBytes::kInPlace || a.has(kWriteLocal) || b.has(kWriteLocal);
}

bool may_join(std::span<const Step> phase, const Step& step, PeerBytes peer_bytes) {
  if (phase.empty() || phase.size() == kMaxPhaseSteps || uses_multicast(step)) return false;
  return std::none_of(phase.begin(), phase.end(), [&](const Step& other) {
    if (share_chunks(other, step, peer_bytes) || uses_multicast(other)) return true;
    if ((other.src_peers & step.src_peers) != 0 || (other.dst_peers & step.dst_peers) != 0) {
      return true;
    }
    // A phase posts behind its last wait. If its posts all stand behind its waits anyway, then no
    // message is later than without phases, and there is no new circle of waits for messages.
    return peer_bytes == PeerBytes::kOnLinks && other.dst_peers != 0 && step.src_peers != 0;
  });
}

}  // namespace

void join_phases(Program& program, PeerBytes peer_bytes) {
  std::vector<Step>& steps = program.steps;
  size_t first = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (may_join({steps.data() + first, i - first}, steps[i], peer_bytes)) {
      steps[i].flags |= kSamePhase;
    } else {
      first = i;
    }
  }
}

}  // namespace pycoll
