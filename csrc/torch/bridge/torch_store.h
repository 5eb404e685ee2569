// c10d's store as the one through which the core's ranks meet.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch/bridge/core.h"

namespace pycoll::torch_backend {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Waits until the key is there; false when it is not after `timeout`. A signal ends the wait.
bool wait_for_key(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout);

/// Makes the core's communicator of the group whose ranks share `store`. Collective; a group can be
/// made again through the same store, as often on each rank.
pycoll_comm* open_comm(const StorePtr& store, int rank, int num_ranks,
                       std::chrono::milliseconds timeout);

}  // namespace pycoll::torch_backend
