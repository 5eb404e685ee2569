// The world's communicator, from what the launcher put into the environment.
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

}  // namespace pycoll
