// How ranks that share another library's store become a communicator.
#pragma once

#include <memory>

#include "capi/pycoll.h"
#include "comm/communicator.h"

namespace pycoll {

/// Collective over the ranks. Raises TimeoutError naming the ranks that did not come, UsageError
/// where they disagree about their number, and what the store says.
std::unique_ptr<Communicator> open_through(const pycoll_store& store, int rank, int num_ranks,
                                           double timeout_s);

}  // namespace pycoll
