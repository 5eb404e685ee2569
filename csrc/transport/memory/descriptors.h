// Passes one file descriptor of each rank to all others, over Unix sockets that live for this
// alone.
#pragma once

#include <functional>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "transport/transport.h"

namespace pycoll {

/// Gathers `nbytes` of every rank into `all`, on all ranks: whatever links they have already.
using AllGather = std::function<void(const void* mine, void* all, size_t nbytes)>;

/// Every rank calls this with a descriptor of its own, which stays its own. By rank; the own place
/// stays empty. Raises TimeoutError that names a rank that did not come, PeerDiedError,
/// SystemError.
std::vector<Fd> pass_descriptors(Transport& transport, int own, const AllGather& gather,
                                 const Deadline& deadline);

}  // namespace pycoll
