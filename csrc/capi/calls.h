// Conversion of C calls to the core's types.
#pragma once

#include <vector>

#include "capi/pycoll.h"
#include "comm/call.h"
#include "p2p/message.h"

namespace pycoll {

Call call_of(const pycoll_call& call);
/// Raises UsageError for an invalid tag or peer.
MessageOp message_of(const pycoll_message& message, int num_ranks);

/// A call with its own copy of the counts, so that it may outlive the caller's pycoll_call. The
/// caller still owns the buffers.
class KeptCall {
 public:
  KeptCall(const pycoll_call& call, int num_ranks);
  const Call& call() const { return call_; }

 private:
  Call call_;
  std::vector<int64_t> counts_;  // block_counts, or send_counts and then recv_counts
};

}  // namespace pycoll
