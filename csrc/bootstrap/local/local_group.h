// Setup of the ranks of one host: shared memory, and a pidfd of every process.
//
// Rank 0 leads: it creates the memory (a sealed memfd, so there is no file to clean up) and listens
// at an abstract Unix socket. Every other rank sends its own pidfd; once all have, the leader sends
// the memory, and the pidfds that the ranks do not have yet, to every rank. Ranks pass kernel
// objects, never names: no process can open the wrong memory, and a killed job leaves nothing
// behind.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"

namespace pycoll {

// The memory and all pidfds fit into one packet.
inline constexpr int kMaxLocalRanks = 252;

/// Handles on the ranks' processes. A group shares them with the groups that are made from it.
using Pidfds = std::vector<std::shared_ptr<const Fd>>;

struct LocalGroup {
  Fd memory;                // memfd of shared_bytes zeros; it can neither shrink nor grow
  Pidfds pidfds;            // of every rank, including the own one
  std::vector<pid_t> pids;  // in the leader's pid namespace
};

/// Initializes the memory on the leader once all ranks have arrived, before any other rank gets it.
/// Takes the memfd and the processes of all ranks; may raise SystemError.
using PrepareMemory = std::function<void(int memory, std::span<const pid_t> pids)>;

/// Creates a memfd of `nbytes` zeros that can neither shrink nor grow. Raises SystemError.
Fd create_shared_memory(size_t nbytes);

/// Every rank of the group calls this with the same `name`, `num_ranks`, `shared_bytes` and
/// `token`.
///
/// Raises on every rank that arrived: TimeoutError naming the ranks that had not arrived when the
/// first deadline passed, or PeerDiedError naming a rank whose process ended while it waited here.
/// A rank whose arguments differ from the leader's raises UsageError and counts as not arrived. The
/// call does not notice a rank that dies after the last one arrived: its pidfd shows it. `prepare`
/// is called on rank 0 only. `known`: the processes, if all ranks have them already; then they are
/// not sent.
LocalGroup form_local_group(const std::string& name, int rank, int num_ranks, size_t shared_bytes,
                            const std::string& token, const Deadline& deadline,
                            const PrepareMemory& prepare = {}, Pidfds known = {});

}  // namespace pycoll
