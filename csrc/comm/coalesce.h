// A group of operations that is handed over first and run at its end, in one go.
//
// Messages are all posted before anything waits, so that no order of sends and receives within a
// group can deadlock. Collectives run in their order; neighbouring small all_reduces are packed
// into one where that cannot change a bit of the result.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace pycoll {

class Batch {
 public:
  /// `keep_alive` holds what the operation points to, until the batch is gone.
  void add(const Call& call, std::shared_ptr<void> keep_alive);
  void add(const MessageOp& op, std::shared_ptr<void> keep_alive);
  /// Of all operations.
  int64_t nbytes() const { return nbytes_; }

  /// Runs all. Raises the error that ended it; the communicator is broken then, unless the first
  /// collective was refused and there were no messages.
  void run(Communicator& comm, const OnSlow& on_slow);

 private:
  struct QueuedCall {
    Call call;
    std::string algorithm;
  };

  void run_calls(Communicator& comm, const OnSlow& on_slow);
  size_t fusable_from(size_t first, int num_ranks) const;
  void run_fused(Communicator& comm, size_t first, size_t end, const OnSlow& on_slow);

  std::vector<QueuedCall> calls_;
  std::vector<std::shared_ptr<MessageOp>> messages_;
  std::vector<std::shared_ptr<void>> keep_alive_;
  std::unique_ptr<std::byte[]> packed_;  // small all_reduces behind each other
  int64_t nbytes_ = 0;
};

}  // namespace pycoll
