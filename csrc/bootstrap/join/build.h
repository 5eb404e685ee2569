// Version and memory layout of the pycoll that a rank runs. Ranks compare them before they read
// anything else of each other: everything after this record has the format of its version.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/join/serialize.h"

namespace pycoll {

struct Build {
  std::string version;  // empty: the rank's pycoll does not send one
  std::string layout;   // of the memory and the frames that ranks share
  std::string host;     // name of the rank's host, for messages

  /// The build of this process. `layout` comes from the layer that shares memory.
  static Build own(const std::string& layout);
  /// Writes the record. Its format is the same in all versions.
  void write(WireWriter& writer) const;
  /// Reads a record of any version. Other bytes give a build without a version.
  static Build read(WireReader& reader);

  bool matches(const Build& other) const {
    return version == other.version && layout == other.layout;
  }
};

/// Raises UsageError if a rank has another build than rank 0; the text is the same on all ranks.
void check_builds(const std::vector<Build>& of_ranks);

}  // namespace pycoll
