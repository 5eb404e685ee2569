// The fingerprint of this machine, and the path of its tuning table.
#pragma once

#include <string>

namespace pycoll {

/// Text that identifies the machine as far as it affects times: CPU, cores, architecture.
std::string machine_fingerprint();

/// Path of this machine's tuning table: in PYCOLL_CACHE_DIR, else XDG_CACHE_HOME/pycoll, else
/// HOME/.cache/pycoll. Machines that share a home directory have one file each. Empty if none of
/// the three variables is set.
std::string tuning_table_path();

/// Reads at most `max_bytes` of a file. Returns 0 or an errno.
int read_file(const std::string& path, size_t max_bytes, std::string& text);

}  // namespace pycoll
