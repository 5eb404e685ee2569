// Reads another process's memory through the kernel: one copy, without a slot. Nothing writes it: a
// rank that was stopped within a write could go on long after the others have given up.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace pycoll {

/// False with PYCOLL_PEER_MEMORY=0, which is for tests of the fallback and for systems on which the
/// calls are slow.
bool process_memory_enabled();

/// Returns false and sets errno if the system refuses or the process has ended.
bool read_process(pid_t pid, uint64_t address, void* to, size_t nbytes);

}  // namespace pycoll
