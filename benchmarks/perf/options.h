// The command line of the perf binaries: the flags of nccl-tests, where they mean something here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reduce/dtypes.h"
#include "reduce/ops.h"
#include "schedule/collectives.h"

namespace pycoll::perf {

enum class RanksAre { kProcesses, kThreads, kLaunched };

struct Options {
  int64_t min_bytes = int64_t{32} << 20;
  int64_t max_bytes = int64_t{32} << 20;
  int64_t step_bytes = int64_t{1} << 20;  // used when step_factor is 0
  int step_factor = 0;
  int iters = 0;  // calls of a block; 0: as many as take 2 ms
  int num_blocks = 40;
  int warmup_iters = 10;
  bool check = true;
  bool blocking = true;
  std::optional<bool> registered;  // nothing: as Python registers arrays by itself
  bool pinned = true;
  std::vector<Op> ops = {Op::kSum};
  std::vector<DType> dtypes = {DType::kF32};
  int root = 0;
  RanksAre ranks_are = RanksAre::kProcesses;
  int num_ranks = 2;
  int num_devices = 0;  // whose memory the arrays are in, dealt to the ranks in turn; 0: the host's
  double timeout_s = 60;
  std::string algorithm;
  std::string json_path;
};

/// Sizes from min_bytes to max_bytes.
std::vector<int64_t> sizes(const Options& options);

/// Reads the flags. Exits with help (status 0), or raises UsageError that names the flag.
/// Ranks are those of the launcher where its environment names some (bootstrap/join/launch_env.h).
Options parse_options(const CollectiveInfo& collective, int argc, char** argv);

}  // namespace pycoll::perf
