// Another process's memory, read and written by the kernel: one copy, without a slot between.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace pycoll {

/// False when PYCOLL_PEER_MEMORY=0 forbids it: for tests of the way around, and for systems where
/// the calls exist and are slow.
bool process_memory_enabled();

/// False with errno set when the system refuses or the process is gone.
bool read_process(pid_t pid, uint64_t address, void* to, size_t nbytes);
bool write_process(pid_t pid, uint64_t address, const void* from, size_t nbytes);

}  // namespace pycoll
