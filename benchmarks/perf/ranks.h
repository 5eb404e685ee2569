// The ranks of a perf binary: processes that it forks, threads, or those of a launcher.
#pragma once

#include <functional>

#include "comm/communicator.h"
#include "perf/options.h"

namespace pycoll::perf {

/// Runs `rank_main` on every rank that this process is to run, each with its communicator.
/// Returns the exit status: 0 when it returned true on all of them.
int run_ranks(const Options& options, const std::function<bool(Communicator&)>& rank_main);

}  // namespace pycoll::perf
