#include "torch/operation.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>

namespace pycoll::torch_backend {
namespace {

// Below this, malloc is quicker than the heap's lock, and slots are quicker than direct access.
constexpr size_t kMinSharedBytes = 64 << 10;

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.defined(), what, ": the tensor is undefined");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), what, ": the tensor is on ", tensor.device(),
                    ", and pycoll moves CPU tensors only in this version: use "
                    "init_process_group(\"cpu:pycoll,cuda:nccl\") for both");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, what, ": the tensor is ", tensor.layout(),
                    ", expected a dense one");
}

void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  if (is_plain(to) && is_plain(from) && to.scalar_type() == from.scalar_type()) {
    const size_t nbytes = to.nbytes();
    if (nbytes != 0) std::memcpy(to.data_ptr(), from.data_ptr(), nbytes);
    return;
  }
  const at::NoGradGuard no_grad;
  to.copy_(from.view(to.sizes()));
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* const first = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* const second = static_cast<const std::byte*>(b.const_data_ptr());
  return first < second + b.nbytes() && second < first + a.nbytes();
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
  check_tensor(tensor, title);
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
  check_tensor(tensor, title);
  outputs.push_back(tensor);
  if (is_plain(tensor)) return tensor;
  kept.push_back(at::empty(tensor.sizes(), tensor.options()));
  copy_after(tensor, kept.back());
  return kept.back();
}

at::Tensor Operation::in_out(const at::Tensor& tensor) {
  check_tensor(tensor, title);
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

at::Tensor Operation::scratch(int64_t numel, at::ScalarType scalar_type,
                              SharedAllocator& allocator) {
  const size_t nbytes = static_cast<size_t>(numel) * c10::elementSize(scalar_type);
  kept.push_back(nbytes < kMinSharedBytes ? at::empty({numel}, at::TensorOptions(scalar_type))
                                          : allocator.allocate(numel, scalar_type));
  return kept.back();
}

std::vector<int64_t>& Operation::keep_counts(std::vector<int64_t> of_ranks) {
  return *counts.emplace_back(std::make_unique<std::vector<int64_t>>(std::move(of_ranks)));
}

void Operation::finish() {
  for (const auto& [to, from] : copies) copy_elements(to, from);
}

}  // namespace pycoll::torch_backend
