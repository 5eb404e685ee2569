// What this machine is, and where its measured table lies.
#pragma once

#include <string>

namespace pycoll {

/// What tells this machine from others, as far as a message's time goes: CPU, cores, architecture.
std::string machine_fingerprint();

/// The measured table of this machine: in PYCOLL_CACHE_DIR, else XDG_CACHE_HOME/pycoll, else
/// HOME/.cache/pycoll. Machines that share a home directory have a file each. Empty when none of
/// the three is set.
std::string tuning_table_path();

/// Reads at most `max_bytes` of a file. Returns 0 or an errno.
int read_file(const std::string& path, size_t max_bytes, std::string& text);

}  // namespace pycoll
