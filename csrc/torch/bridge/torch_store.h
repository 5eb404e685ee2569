// c10d's store as the core's store, through which the ranks meet.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch/bridge/core.h"

namespace pycoll::torch_backend {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Waits until the key exists; false when `timeout` has passed. A signal ends the wait.
bool wait_for_key(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout);

/// Makes the core's communicator of the ranks that share `store`. Collective. The same store can be
/// used for several communicators in turn, in the same order on all ranks.
pycoll_comm* open_comm(const StorePtr& store, int rank, int num_ranks,
                       std::chrono::milliseconds timeout);

}  // namespace pycoll::torch_backend
