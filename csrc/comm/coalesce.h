// A group of operations that are collected first and run together at the end of the group.
//
// All messages are posted before the first wait, so that no order of sends and receives within a
// group can deadlock. Collectives run in order; consecutive small all_reduces are packed into one
// if that cannot change a bit of the result.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace pycoll {

class Batch {
 public:
  /// Adds an operation. `keep_alive` owns its arrays until the batch is destroyed.
  void add(const Call& call, std::shared_ptr<void> keep_alive);
  void add(const MessageOp& op, std::shared_ptr<void> keep_alive);
  /// Bytes of all operations.
  int64_t nbytes() const { return nbytes_; }

  /// Runs all operations. Raises the first error; the communicator is broken then, unless the first
  /// collective was refused and there are no messages.
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
  std::unique_ptr<std::byte[]> packed_;  // payload of packed all_reduces
  int64_t nbytes_ = 0;
};

}  // namespace pycoll
