// One operation between torch's call and the core: the core's calls, their tensors, and the copies
// to make afterwards.
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

  /// Adds a call with the elements of `tensor`, whose shape is used in error messages. The
  /// reference is valid until the next call is added.
  pycoll_call& add(pycoll_collective collective, const at::Tensor& tensor);
  pycoll_call& add(pycoll_collective collective);
  void set_reduction(pycoll_call& call, const c10d::ReduceOp& op, at::ScalarType scalar_type) {
    const Reduction reduction = reduction_of(op, scalar_type, title);
    call.op = reduction.op;
    call.factor = reduction.factor;
  }

  /// Each of these three returns a tensor whose memory the core can read, write, or both: `tensor`
  /// itself if it is contiguous, else a copy, whose results finish() copies back. They raise like
  /// check().
  at::Tensor input(const at::Tensor& tensor);
  at::Tensor output(const at::Tensor& tensor);
  at::Tensor in_out(const at::Tensor& tensor);

  /// Records a tensor of the caller for the profiler. The three methods above record the ones that
  /// they read.
  void note(const at::Tensor& tensor) {
    if (at::hasCallbacks()) [[unlikely]]
      profiled.push_back(tensor);
  }

  /// Raises for a tensor that is on another device than the operation's other tensors, on a device
  /// that pycoll does not support, or not strided.
  void check(const at::Tensor& tensor);
  /// Device of the checked tensors; the CPU when there are none.
  at::Device device() const { return device_.value_or(at::kCPU); }
  bool on_device() const { return device_ && !device_->is_cpu(); }
  /// Sets the device of an operation without tensors.
  void set_device(at::Device device) { device_ = device; }

  /// A copy of a tensor that may be overwritten before it is read.
  at::Tensor copy_of(const at::Tensor& tensor);
  /// Scratch memory with the dtype and device of `like`. Large CPU memory comes from the shared
  /// heap.
  at::Tensor scratch(int64_t numel, const at::Tensor& like, SharedAllocator& allocator);
  /// Runs `target.copy_(source)` in finish(). Both have the same number of elements.
  void copy_after(const at::Tensor& target, const at::Tensor& source) {
    copies.emplace_back(target, source);
  }
  /// Counts that live as long as the operation.
  std::vector<int64_t>& keep_counts(std::vector<int64_t> of_ranks);

  /// Runs the remaining copies after the core's operation; on a device, in the order of its stream.
  /// Called on any thread, without the GIL.
  void finish();
  /// Calls `visit` with each tensor whose memory is in use until the operation ends.
  template <class Visit>
  void for_each_tensor(Visit&& visit) const {
    for (const at::Tensor& tensor : kept) visit(tensor);
    for (const at::Tensor& tensor : outputs) visit(tensor);
  }

  c10d::OpType type;
  const char* title;  // name in profiles and messages: "pycoll:all_reduce"
  std::chrono::milliseconds timeout;
  c10::SmallVector<pycoll_call, 1> calls;
  c10::SmallVector<at::Tensor, 4> kept;
  std::vector<at::Tensor> profiled;                       // empty when no profiler is active
  std::vector<at::Tensor> outputs;                        // returned by Work::result()
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  std::vector<std::unique_ptr<std::vector<int64_t>>> counts;

 private:
  std::optional<at::Device> device_;
};

/// Whether two contiguous tensors share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);
/// Copies elements, also on threads of the core. Both tensors have the same number.
void copy_elements(const at::Tensor& to, const at::Tensor& from);

}  // namespace pycoll::torch_backend
