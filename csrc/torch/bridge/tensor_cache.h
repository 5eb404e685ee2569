// Registers tensors that are used repeatedly (a model's parameters, gradient buckets), so that
// peers access them without a copy.
#pragma once

#include <c10/core/StorageImpl.h>

#include <array>
#include <mutex>

#include "torch/bridge/operation.h"

namespace pycoll::torch_backend {

/// Counts how often each tensor in torch's own memory is passed, and has the core register a tensor
/// once it has been passed often enough. A tensor is identified by its storage, not by its address,
/// which may be reused; the storage's deleter runs before its memory is freed.
class TensorCache {
 public:
  /// `after`: uses of a tensor before it is cached; 0: never.
  TensorCache(const Comm& comm, int after) : comm_(comm), after_(after) {}

  /// Counts one use. Called before the operation begins, while no other operation uses its tensors.
  void note(const Operation& operation) {
    if (after_ == 0) return;
    for (const at::Tensor& tensor : operation.outputs) note(tensor);
    for (const at::Tensor& tensor : operation.kept) note(tensor);
  }

 private:
  // Below this size, moving a tensor pays only after it has been passed hundreds of times.
  static constexpr size_t kMinBytes = 64 << 10;
  static constexpr size_t kNumSeen = 256;

  struct Seen {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    const c10::StorageImpl* address = nullptr;  // unique while `storage` is alive
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
  uint64_t now_ = 0;  // counts uses, so that the entry used less recently is replaced
};

/// Default of pg_options: PYCOLL_REGISTER_AFTER if set, else 0 where there is a GPU, whose driver
/// may have pinned a tensor's pages, else 8 uses. Raises ValueError when the variable cannot be
/// read.
int default_register_after();

}  // namespace pycoll::torch_backend
