#include "torch/bridge/operation.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>

namespace pycoll::torch_backend {
namespace {

// Below this size, malloc is faster than the heap's lock, and slots are faster than direct access.
constexpr size_t kMinSharedBytes = 64 << 10;

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

/// Raises for a device that the core's device library does not support.
void check_device(at::Device device, const char* what) {
  pycoll_error error;
  const bool may_be = device.is_cuda() || device.is_privateuseone();
  const char* const kind = may_be ? core().device_kind(&error) : nullptr;
  TORCH_CHECK_VALUE(!may_be || kind != nullptr, what, ": the tensor is on ", device, ", but ",
                    error.message, "; or use init_process_group(\"cpu:pycoll,cuda:nccl\")");
  // The device type may belong to another library of torch; only the emulated device uses that
  // name.
  const bool known = may_be && (kind == std::string_view("cuda")) == device.is_cuda();
  TORCH_CHECK_VALUE(known, what, ": the tensor is on ", device,
                    ", expected the CPU or a CUDA device");
}

}  // namespace

void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  if (to.device().is_cpu() && is_plain(to) && is_plain(from) &&
      to.scalar_type() == from.scalar_type()) {
    const size_t nbytes = to.nbytes();
    if (nbytes != 0) std::memcpy(to.data_ptr(), from.data_ptr(), nbytes);
    return;
  }
  const at::NoGradGuard no_grad;
  // The host must not wait for a device here.
  to.copy_(from.view(to.sizes()), /*non_blocking=*/!to.device().is_cpu());
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* const first = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* const second = static_cast<const std::byte*>(b.const_data_ptr());
  return first < second + b.nbytes() && second < first + a.nbytes();
}

void Operation::check(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), title, ": the tensor is undefined");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, title, ": the tensor is ", tensor.layout(),
                    ", expected a dense one");
  if (device_) {
    TORCH_CHECK_VALUE(*device_ == tensor.device(), title, ": one tensor is on ", tensor.device(),
                      ", another on ", *device_);
    return;
  }
  if (!tensor.device().is_cpu()) check_device(tensor.device(), title);
  device_ = tensor.device();
}

pycoll_call& Operation::add(pycoll_collective collective) {
  pycoll_call& call = calls.emplace_back();
  std::memset(&call, 0, sizeof(call));
  call.collective = collective;
  if (timeout.count() > 0) call.timeout_s = std::chrono::duration<double>(timeout).count();
  return call;
}

pycoll_call& Operation::add(pycoll_collective collective, const at::Tensor& tensor) {
  pycoll_call& call = add(collective);
  call.dtype = dtype_of(tensor.scalar_type());
  call.element_size = call.dtype == PYCOLL_OPAQUE ? tensor.element_size() : 0;
  call.count = tensor.numel();
  const at::IntArrayRef sizes = tensor.sizes();
  if (sizes.size() <= PYCOLL_MAX_DIMS) {
    call.num_dims = static_cast<int32_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), call.shape);
  }
  return call;
}

at::Tensor Operation::input(const at::Tensor& tensor) {
  check(tensor);
  note(tensor);
  if (is_plain(tensor)) {
    kept.push_back(tensor);
  } else {
    const at::NoGradGuard no_grad;
    kept.push_back(tensor.resolve_conj().resolve_neg().contiguous());
  }
  return kept.back();
}

at::Tensor Operation::output(const at::Tensor& tensor) {
  check(tensor);
  outputs.push_back(tensor);
  if (is_plain(tensor)) return tensor;
  kept.push_back(at::empty(tensor.sizes(), tensor.options()));
  copy_after(tensor, kept.back());
  return kept.back();
}

at::Tensor Operation::in_out(const at::Tensor& tensor) {
  check(tensor);
  outputs.push_back(tensor);
  if (is_plain(tensor)) {
    note(tensor);
    return tensor;
  }
  const at::Tensor packed = input(tensor);
  copy_after(tensor, packed);
  return packed;
}

at::Tensor Operation::copy_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  kept.push_back(tensor.clone());
  return kept.back();
}

at::Tensor Operation::scratch(int64_t numel, const at::Tensor& like, SharedAllocator& allocator) {
  const size_t nbytes = static_cast<size_t>(numel) * like.element_size();
  const bool shared = like.device().is_cpu() && nbytes >= kMinSharedBytes;
  kept.push_back(shared ? allocator.allocate(numel, like.scalar_type())
                        : at::empty({numel}, like.options()));
  return kept.back();
}

std::vector<int64_t>& Operation::keep_counts(std::vector<int64_t> of_ranks) {
  return *counts.emplace_back(std::make_unique<std::vector<int64_t>>(std::move(of_ranks)));
}

void Operation::finish() {
  for (const auto& [to, from] : copies) copy_elements(to, from);
}

}  // namespace pycoll::torch_backend
