// Tensors in memory that peers access without a copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "torch/bridge/core.h"

namespace pycoll::torch_backend {

/// Allocates blocks of the communicator's heap and reuses freed blocks, whose pages already exist.
/// Lives as long as its backend and every tensor that it has allocated.
class SharedAllocator : public std::enable_shared_from_this<SharedAllocator> {
 public:
  explicit SharedAllocator(const Comm& comm) : comm_(comm) {}
  ~SharedAllocator();

  /// An uninitialised, one-dimensional tensor. Its block is reused after its storage is freed.
  at::Tensor allocate(int64_t numel, at::ScalarType type);
  /// Ends the use of the communicator, which may then be destroyed: no new blocks after this.
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
