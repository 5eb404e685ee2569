// Which process and which host: what is asked of a pidfd, and what tells two hosts apart.
#pragma once

#include <sys/types.h>

#include <span>
#include <string>

#include "base/fd.h"

namespace pycoll {

/// A pidfd of the calling process.
Fd open_own_pidfd();

/// True once the process has ended, reaped or not. Costs one system call.
bool process_ended(int pidfd);

/// The signal that ended the process, or 0: it exited by itself, still runs, or nobody can tell.
///
/// A process that is not reaped yet is looked up in /proc; after that only Linux 6.15 and later
/// still know. Between the two there is a moment without an answer, so that 0 is no proof.
int exit_signal(int pidfd);

/// Cores that at least one of the processes may run on; 0 stands for the calling thread. A process
/// that cannot be asked counts for none.
int num_usable_cores(std::span<const pid_t> pids);

/// The same on all ranks that can share memory and reach each other's abstract sockets: boot id
/// and network namespace. Two network namespaces of one machine count as two hosts.
std::string host_id();

}  // namespace pycoll
