// The world's communicator, from what the launcher put into the environment, or of threads.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace pycoll {

/// Joins the ranks that the environment names (bootstrap/launch_env.h). Collective over them.
/// Raises UsageError for an environment that makes no sense, TimeoutError naming the ranks that did
/// not come before the deadline, whose timeout is also that of every later operation. `interrupt`
/// lets a signal into the wait.
std::unique_ptr<Communicator> init_from_environment(double timeout_s,
                                                    Deadline::Interrupt interrupt = nullptr);

/// A world of ranks that are threads of this process, with the settings of its environment.
std::shared_ptr<LocalWorld> make_world(int num_ranks);

}  // namespace pycoll
