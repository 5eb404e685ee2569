#include "bootstrap/join/build.h"

#include <unistd.h>

#include "base/printable.h"
#include "base/version.h"

namespace pycoll {
namespace {

constexpr std::string_view kBuildMagic = "pycoll build";
constexpr size_t kMaxBuildText = 64;  // longest host name of Linux

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

std::string describe_build(const std::vector<Build>& of_ranks, size_t rank) {
  const Build& build = of_ranks[rank];
  const std::string who = "rank " + std::to_string(rank);
  if (build.version.empty()) return who + " has a pycoll that does not send its version";
  return who + " on host " + build.host + " has pycoll " + build.version + " with memory layout " +
         build.layout;
}

}  // namespace

Build Build::own(const std::string& layout) { return {std::string(kVersion), layout, host_name()}; }

void Build::write(WireWriter& writer) const {
  writer.text(kBuildMagic).text(version).text(layout).text(host);
}

Build Build::read(WireReader& reader) {
  try {
    if (reader.text() != kBuildMagic) return {};
    const auto next = [&reader] { return printable(reader.text(), kMaxBuildText); };
    Build build;
    build.version = next();
    build.layout = next();
    build.host = next();
    return build;
  } catch (const MalformedMessage&) {
    return {};
  }
}

void check_builds(const std::vector<Build>& of_ranks) {
  for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
    if (of_ranks[rank].matches(of_ranks[0])) continue;
    throw UsageError(describe_build(of_ranks, rank) + ", and " + describe_build(of_ranks, 0) +
                     ": install the same pycoll for all ranks");
  }
}

}  // namespace pycoll
