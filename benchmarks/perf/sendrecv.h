// sendrecv: each rank sends to the next one and receives from the one before, in a ring, as
// nccl-tests' sendrecv does. The core knows no such collective, so its row stands here.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "schedule/collectives.h"

namespace pycoll::perf {

/// A number that no row of the core's table has.
inline constexpr Collective kSendRecv{kNumCollectives};

/// The row of this name: sendrecv's, or one of the core's. Raises UsageError.
const CollectiveInfo& row_of(std::string_view name);

/// One rank's send and receive, of `call.count` elements each.
class SendRecv {
 public:
  SendRecv(Communicator& comm, const Call& call);

  /// Both as one group, so many times, on the caller's thread.
  void run(int num_calls);
  /// As run(), but all operations are started before the first wait.
  void run_queued(int num_calls, double timeout_s);

 private:
  Communicator& comm_;
  MessageOp send_;
  MessageOp recv_;
  std::vector<std::shared_ptr<MessageOp>> ops_;  // of run(): made once
};

}  // namespace pycoll::perf
