// Tensors that come again and again get memory that the peers reach without a copy, unseen: a
// model's parameters, buckets of gradients.
#pragma once

#include <c10/core/StorageImpl.h>

#include <array>
#include <mutex>

#include "torch/bridge/operation.h"

namespace pycoll::torch_backend {

/// Counts how often tensors of torch's own memory are passed, and has the core register those that
/// were passed often enough. A tensor is known by its storage, not by its address, which the next
/// one may get; the storage tells when its memory goes.
class TensorCache {
 public:
  /// `after`: uses of a tensor before it is cached; 0: never.
  TensorCache(const Comm& comm, int after) : comm_(comm), after_(after) {}

  /// Called before the operation begins: its tensors are its alone.
  void note(const Operation& operation) {
    if (after_ == 0) return;
    for (const at::Tensor& tensor : operation.outputs) note(tensor);
    for (const at::Tensor& tensor : operation.kept) note(tensor);
  }

 private:
  // Below, moving a tensor does not pay before it has been passed hundreds of times.
  static constexpr size_t kMinBytes = 64 << 10;
  static constexpr size_t kNumSeen = 256;

  struct Seen {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    const c10::StorageImpl* address = nullptr;  // nobody else's while `storage` is there
    const void* data = nullptr;
    size_t nbytes = 0;
    int num_uses = 0;
    uint64_t last_use = 0;  // by now_
  };

  void note(const at::Tensor& tensor) {
    if (tensor.nbytes() >= kMinBytes) [[unlikely]]
      count(tensor);
  }
  void count(const at::Tensor& tensor);
  Seen& find(const at::Tensor& tensor);
  void cache(const at::Tensor& tensor);

  const Comm& comm_;
  const int after_;
  std::mutex mutex_;
  std::array<Seen, kNumSeen> seen_;
  uint64_t now_ = 0;  // counts uses, so that of two places the older one is given up
};

/// What pg_options says if it says nothing: PYCOLL_REGISTER_AFTER, else 8 uses; 0 where there
/// is a GPU, whose driver may have been told of a tensor's pages. Raises ValueError when the
/// variable cannot be read.
int default_register_after();

}  // namespace pycoll::torch_backend
