// Opens a communicator for ranks that share the key-value store of another library.
#pragma once

#include <memory>

#include "capi/pycoll.h"
#include "comm/communicator.h"

namespace pycoll {

/// Collective over the ranks. Raises TimeoutError naming the missing ranks, UsageError when the
/// ranks disagree about their number, and the store's own errors.
std::unique_ptr<Communicator> open_through(const pycoll_store& store, int rank, int num_ranks,
                                           double timeout_s);

}  // namespace pycoll
