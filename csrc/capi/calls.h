// The C calls as the core's.
#pragma once

#include <vector>

#include "capi/pycoll.h"
#include "comm/call.h"
#include "p2p/message.h"

namespace pycoll {

Call call_of(const pycoll_call& call);
/// Raises UsageError for a tag or a peer that there cannot be.
MessageOp message_of(const pycoll_message& message, int num_ranks);

/// A call that outlives its caller's: it has counts of its own. The buffers stay the caller's.
class KeptCall {
 public:
  KeptCall(const pycoll_call& call, int num_ranks);
  const Call& call() const { return call_; }

 private:
  Call call_;
  std::vector<int64_t> counts_;  // block_counts, or send_counts and then recv_counts
};

}  // namespace pycoll
