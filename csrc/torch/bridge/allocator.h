// Tensors in memory that the peers reach without a copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "torch/bridge/core.h"

namespace pycoll::torch_backend {

/// Gives out blocks of the communicator's heap and keeps what comes back for the next tensor: its
/// pages exist already. Lives as long as a tensor of it, or its backend.
class SharedAllocator : public std::enable_shared_from_this<SharedAllocator> {
 public:
  explicit SharedAllocator(const Comm& comm) : comm_(comm) {}
  ~SharedAllocator();

  /// An uninitialised, one-dimensional tensor. Its block comes back when its storage is freed.
  at::Tensor allocate(int64_t numel, at::ScalarType type);
  /// No new blocks from the communicator after this: it may go.
  void close();

 private:
  struct Block {
    pycoll_memory* memory;
    void* data;
    size_t nbytes;
  };
  struct Lease;

  Block take(size_t nbytes);
  void give_back(const Block& block);

  const Comm& comm_;
  std::mutex mutex_;
  bool closed_ = false;
  size_t num_free_bytes_ = 0;
  std::map<size_t, std::vector<Block>> free_;  // by size
};

}  // namespace pycoll::torch_backend
