// Queries about processes, through their pidfds, and the identity of this host.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/fd.h"

namespace pycoll {

/// A pidfd of the calling process.
Fd open_own_pidfd();

/// A copy of descriptor `fd` of the process `pid`; empty if the system refuses. It allows this
/// where it allows reading the process's memory.
Fd fd_of_process(pid_t pid, int fd);

/// Whether the process has ended, reaped or not. Costs one system call.
bool process_ended(int pidfd);

/// Whether a process that has closed its sockets ends: it does so a moment later.
bool ends_soon(int pidfd);

/// Whether a process without a pidfd has ended: the signal that ended it, or 0; nothing if it
/// lives.
std::optional<int> end_of(pid_t pid);

/// The signal that ended the process, or 0: it exited, still runs, or its end is unknown.
///
/// Reads /proc for a process that is not reaped yet; for a reaped one only Linux 6.15 and later
/// know the signal. There is a short gap between the two, so 0 is no proof.
int exit_signal(int pidfd);

/// When an end is to be seen.
enum class Look : uint8_t {
  kQuick,  // when the kernel has freed the memory: 16 ms for 200 MB, and in proportion for more
  kEarly,  // when no thread of the process runs its code again; costs 20 us, to read /proc
};

/// The signal that ended the process, or 0 as for exit_signal(); nothing while it lives.
std::optional<int> ended_by(int pidfd, Look look);

/// Number of cores that at least one of the processes may run on; pid 0 is the calling thread. A
/// process whose affinity cannot be read adds none.
int num_usable_cores(std::span<const pid_t> pids);

/// Boot id and network namespace: identical for all ranks that can share memory and reach each
/// other's abstract sockets. Two network namespaces of one machine count as two hosts.
std::string host_id();

}  // namespace pycoll
