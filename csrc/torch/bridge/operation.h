// One operation on its way from torch's call to the core: the core's calls, the tensors behind
// them, and what is copied where afterwards.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/bridge/allocator.h"
#include "torch/bridge/torch_dtypes.h"

namespace pycoll::torch_backend {

struct Operation {
  Operation(c10d::OpType type, const char* title, std::chrono::milliseconds timeout)
      : type(type), title(title), timeout(timeout) {}

  /// Adds a call whose elements are those of `tensor`, whose shape goes into error messages. The
  /// reference is good until the next one is added.
  pycoll_call& add(pycoll_collective collective, const at::Tensor& tensor);
  pycoll_call& add(pycoll_collective collective);
  void set_reduction(pycoll_call& call, const c10d::ReduceOp& op, at::ScalarType scalar_type) {
    const Reduction reduction = reduction_of(op, scalar_type, title);
    call.op = reduction.op;
    call.factor = reduction.factor;
  }

  /// The three give a tensor whose memory the core can read, write or do both with, which is
  /// `tensor` itself where that is contiguous. Else results are copied back in finish(). Raise
  /// as check().
  at::Tensor input(const at::Tensor& tensor);
  at::Tensor output(const at::Tensor& tensor);
  at::Tensor in_out(const at::Tensor& tensor);

  /// For profiles: a tensor that the caller passed. The three above note those that they read.
  void note(const at::Tensor& tensor) {
    if (at::hasCallbacks()) [[unlikely]]
      profiled.push_back(tensor);
  }

  /// Raises for a tensor that cannot be passed: of another device than the operation's others, of
  /// one that pycoll does not know, or not strided.
  void check(const at::Tensor& tensor);
  /// Of the tensors that were checked; the CPU where there was none.
  at::Device device() const { return device_.value_or(at::kCPU); }
  bool on_device() const { return device_ && !device_->is_cpu(); }
  /// For one without tensors.
  void set_device(at::Device device) { device_ = device; }

  /// A copy of what may be overwritten before it is read.
  at::Tensor copy_of(const at::Tensor& tensor);
  /// Memory of the operation's own, of the type and device of `like`. The CPU's is from the shared
  /// heap, where that pays.
  at::Tensor scratch(int64_t numel, const at::Tensor& like, SharedAllocator& allocator);
  /// `target.copy_(source)` in finish(). Of the same number of elements.
  void copy_after(const at::Tensor& target, const at::Tensor& source) {
    copies.emplace_back(target, source);
  }
  /// Counts that live as long as the operation.
  std::vector<int64_t>& keep_counts(std::vector<int64_t> of_ranks);

  /// What is left to do once the core is done, or, on a device, on the stream that it does it on.
  /// On any thread, without the GIL.
  void finish();
  /// Whose memory is used until it is over.
  template <class Visit>
  void for_each_tensor(Visit&& visit) const {
    for (const at::Tensor& tensor : kept) visit(tensor);
    for (const at::Tensor& tensor : outputs) visit(tensor);
  }

  c10d::OpType type;
  const char* title;  // "pycoll:all_reduce": in profiles and messages
  std::chrono::milliseconds timeout;
  c10::SmallVector<pycoll_call, 1> calls;
  c10::SmallVector<at::Tensor, 4> kept;
  std::vector<at::Tensor> profiled;                       // empty when nobody profiles
  std::vector<at::Tensor> outputs;                        // what Work::result() says
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  std::vector<std::unique_ptr<std::vector<int64_t>>> counts;

 private:
  std::optional<at::Device> device_;
};

/// Whether two contiguous tensors share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);
/// Copies elements, also between threads of the core. The two have as many.
void copy_elements(const at::Tensor& to, const at::Tensor& from);

}  // namespace pycoll::torch_backend
