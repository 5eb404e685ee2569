// Phases: runs of consecutive steps of a program that a team of threads may run at once. A phase
// waits for everything that its steps wait for, moves all of their bytes, then posts to all of
// their destinations: it needs one agreement of the threads where its steps would need one each.
//
// The steps of a phase do not depend on each other: none touches local chunks that another one
// writes, no two use one end of a link, and no destination is kept waiting for a source that its
// step would not have waited for. The proof (verify.h) checks the first two by themselves, and
// executes a phase only when none of its steps would wait.
#pragma once

#include "schedule/step.h"

namespace pycoll {

/// Where steps find the bytes of their peers.
enum class PeerBytes : uint8_t {
  kOnLinks,  // in slots: a step waits for its peers
  kInPlace,  // in the peers' own buffers: no step waits, and a step may write its peers' chunks
};

/// Marks the steps that belong to the phase of the step before them. Keeps their order, and so
/// every link's order.
void join_phases(Program& program, PeerBytes peer_bytes);

}  // namespace pycoll
