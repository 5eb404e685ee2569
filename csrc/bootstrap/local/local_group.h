// What the ranks of one host give each other once: shared memory, and a handle on every process.
//
// Rank 0 leads: it makes the memory (a sealed memfd, so no file and nothing to clean up), and
// listens at an abstract Unix socket. Everyone else sends a pidfd of itself; when all have, the
// leader hands the memory and all pidfds to everyone. Kernel objects are passed, never names: no
// process can mistake another one's memory, and what is left of a killed job is nothing.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"

namespace pycoll {

// The memory and all pidfds fit into one packet.
inline constexpr int kMaxLocalRanks = 252;

struct LocalGroup {
  Fd memory;                // memfd of shared_bytes zeros; it can neither shrink nor grow
  std::vector<Fd> pidfds;   // of every rank, one's own too
  std::vector<pid_t> pids;  // as the leader sees them
};

/// What the leader writes into the memory when all have come, before anyone else has it. Gets the
/// memfd and the processes of all ranks; may raise SystemError.
using PrepareMemory = std::function<void(int memory, std::span<const pid_t> pids)>;

/// A memfd of so many zeros that can neither shrink nor grow. Raises SystemError.
Fd create_shared_memory(size_t nbytes);

/// Every rank of the group calls this with the same `name`, `num_ranks`, `shared_bytes` and
/// `token`.
///
/// Raises on every rank that came: TimeoutError naming the ranks that did not come before the first
/// deadline to pass, PeerDiedError naming a rank whose process ended while it waited here. A rank
/// whose arguments differ from the leader's raises UsageError, and counts as one that did not come.
/// A rank that dies after the last one came is not noticed here: its pidfd tells. `prepare` is
/// called on rank 0 only.
LocalGroup form_local_group(const std::string& name, int rank, int num_ranks, size_t shared_bytes,
                            const std::string& token, const Deadline& deadline,
                            const PrepareMemory& prepare = {});

}  // namespace pycoll
