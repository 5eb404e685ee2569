// Passes one file descriptor of each rank to all other ranks, over temporary Unix sockets.
#pragma once

#include <functional>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "transport/transport.h"

namespace pycoll {

/// Gathers `nbytes` of every rank into `all` on all ranks, over any existing links.
using AllGather = std::function<void(const void* mine, void* all, size_t nbytes)>;

/// Every rank calls this with its own descriptor, which it keeps. Returns the descriptors by rank;
/// the own entry stays empty. Raises TimeoutError naming a rank that did not send one,
/// PeerDiedError or SystemError.
std::vector<Fd> pass_descriptors(Transport& transport, int own, const AllGather& gather,
                                 const Deadline& deadline);

}  // namespace pycoll
