#include "torch/lists.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "torch/backend.h"

namespace pycoll::torch_backend {
namespace {

using c10d::OpType;

/// Whether the tensors are contiguous and adjacent, in order, in one storage.
bool lie_in_order(const Tensors& tensors) {
  const auto* end = static_cast<const std::byte*>(tensors[0].const_data_ptr());
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg() ||
        !tensor.storage().is_alias_of(tensors[0].storage()) || tensor.const_data_ptr() != end) {
      return false;
    }
    end += tensor.nbytes();
  }
  return true;
}

at::Tensor flat_view(const Tensors& tensors, int64_t numel) {
  const at::NoGradGuard no_grad;
  return tensors[0].detach().as_strided({numel}, {1});
}

int64_t total(const Tensors& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), int64_t{0},
      [](int64_t sum, const at::Tensor& tensor) { return sum + tensor.numel(); });
}

/// Refuses results that share memory: the value left there would depend on timing.
void check_apart(const Tensors& tensors, const char* what) {
  std::vector<std::pair<const std::byte*, const std::byte*>> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0 || !tensor.is_contiguous()) continue;
    const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    ranges.emplace_back(begin, begin + tensor.nbytes());
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    TORCH_CHECK_VALUE(ranges[i].first >= ranges[i - 1].second, what,
                      ": two of the output tensors share memory (a list like [tensor] * n?): pass "
                      "a separate tensor for each rank");
  }
}

}  // namespace

std::vector<int64_t> numels(const Tensors& tensors) {
  std::vector<int64_t> counts;
  counts.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

bool all_equal(const std::vector<int64_t>& counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

void check_list(Operation& operation, const Tensors& tensors, int num_ranks,
                const at::Tensor& like) {
  const char* const what = operation.title;
  TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(num_ranks), what, ": a list of ",
                    tensors.size(), " tensors, expected one for each of the ", num_ranks, " ranks");
  for (const at::Tensor& tensor : tensors) {
    operation.check(tensor);
    TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type(), what, ": a tensor of ",
                      tensor.scalar_type(), " in the list, expected ", like.scalar_type());
  }
}

at::Tensor flat_input(Operation& operation, const Tensors& tensors, SharedAllocator& allocator) {
  const int64_t numel = total(tensors);
  for (const at::Tensor& tensor : tensors) operation.note(tensor);
  if (lie_in_order(tensors)) {
    operation.kept.push_back(flat_view(tensors, numel));
    return operation.kept.back();
  }
  at::Tensor flat = operation.scratch(numel, tensors[0], allocator);
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    copy_elements(flat.narrow(0, at, tensor.numel()), tensor.detach().reshape({-1}));
    at += tensor.numel();
  }
  return flat;
}

at::Tensor flat_output(Operation& operation, const Tensors& tensors, SharedAllocator& allocator) {
  operation.outputs = tensors;
  const int64_t numel = total(tensors);
  if (lie_in_order(tensors)) {
    operation.kept.push_back(flat_view(tensors, numel));
    return operation.kept.back();
  }
  check_apart(tensors, operation.title);
  at::Tensor flat = operation.scratch(numel, tensors[0], allocator);
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    operation.copy_after(tensor, flat.narrow(0, at, tensor.numel()));
    at += tensor.numel();
  }
  return flat;
}

// The operations.

WorkPtr PycollBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& opts) {
  Operation operation(OpType::ALLGATHER, "pycoll:all_gather", opts.timeout);
  const at::Tensor& input = only(inputs, operation.title);
  TORCH_CHECK_VALUE(outputs.size() == 1, operation.title, " takes one list of outputs, got ",
                    outputs.size());
  add_all_gather_list(operation, outputs[0], input);
  return launch(std::move(operation), opts.asyncOp);
}

void PycollBackend::add_all_gather_list(Operation& operation, const Tensors& outputs,
                                        const at::Tensor& input) {
  check_list(operation, outputs, size_, input);
  const std::vector<int64_t> counts = numels(outputs);
  const int64_t own = counts[static_cast<size_t>(rank_)];
  TORCH_CHECK_VALUE(own == input.numel(), operation.title, ": the input has ", input.numel(),
                    " elements, the output for this rank (", rank_, ") ", own);
  at::Tensor x = operation.input(input);
  Tensors results = std::move(operation.outputs);  // results of earlier lists of a coalesced call
  const at::Tensor all = flat_output(operation, outputs, *allocator_);
  results.insert(results.end(), outputs.begin(), outputs.end());
  operation.outputs = std::move(results);
  if (overlap(all, x)) x = operation.copy_of(x);
  pycoll_call& call = operation.add(PYCOLL_ALL_GATHER, x);
  call.input = x.data_ptr();
  call.output = all.data_ptr();
  if (!all_equal(counts)) call.block_counts = operation.keep_counts(counts).data();
}

WorkPtr PycollBackend::gather(TensorLists& outputs, Tensors& inputs,
                              const c10d::GatherOptions& opts) {
  Operation operation(OpType::GATHER, "pycoll:gather", opts.timeout);
  TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, operation.title, ": root is ",
                    opts.rootRank);
  const bool at_root = rank_ == opts.rootRank;
  const at::Tensor x = operation.input(only(inputs, operation.title));
  pycoll_call& call = operation.add(PYCOLL_GATHER, x);
  call.root = static_cast<int32_t>(opts.rootRank);
  call.input = x.data_ptr();
  if (at_root) {
    TORCH_CHECK_VALUE(outputs.size() == 1, operation.title,
                      " takes one list of outputs at its root, got ", outputs.size());
    check_list(operation, outputs[0], size_, x);
    const std::vector<int64_t> counts = numels(outputs[0]);
    TORCH_CHECK_VALUE(all_equal(counts) && counts[0] == x.numel(), operation.title,
                      ": the outputs have ", counts, " elements, expected ", x.numel(),
                      " each, like the input");
    const at::Tensor all = flat_output(operation, outputs[0], *allocator_);
    if (overlap(all, x)) call.input = operation.copy_of(x).data_ptr();
    call.output = all.data_ptr();
  } else {
    TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(), operation.title, ": outputs on rank ",
                      rank_, ", which is not the root (", opts.rootRank, ")");
  }
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::scatter(Tensors& outputs, TensorLists& inputs,
                               const c10d::ScatterOptions& opts) {
  Operation operation(OpType::SCATTER, "pycoll:scatter", opts.timeout);
  TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, operation.title, ": root is ",
                    opts.rootRank);
  const bool at_root = rank_ == opts.rootRank;
  const at::Tensor y = operation.output(only(outputs, operation.title));
  pycoll_call& call = operation.add(PYCOLL_SCATTER, y);
  call.root = static_cast<int32_t>(opts.rootRank);
  call.output = y.data_ptr();
  if (at_root) {
    TORCH_CHECK_VALUE(inputs.size() == 1, operation.title,
                      " takes one list of inputs at its root, got ", inputs.size());
    check_list(operation, inputs[0], size_, y);
    const std::vector<int64_t> counts = numels(inputs[0]);
    TORCH_CHECK_VALUE(all_equal(counts) && counts[0] == y.numel(), operation.title,
                      ": the inputs have ", counts, " elements, expected ", y.numel(),
                      " each, like the output");
    at::Tensor all = flat_input(operation, inputs[0], *allocator_);
    if (overlap(all, y)) all = operation.copy_of(all);
    call.input = all.data_ptr();
  } else {
    TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(), operation.title, ": inputs on rank ",
                      rank_, ", which is not the root (", opts.rootRank, ")");
  }
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ReduceScatterOptions& opts) {
  Operation operation(OpType::REDUCE_SCATTER, "pycoll:reduce_scatter", opts.timeout);
  TORCH_CHECK_VALUE(inputs.size() == 1, operation.title, " takes one list of inputs, got ",
                    inputs.size());
  const at::Tensor y = operation.output(only(outputs, operation.title));
  check_list(operation, inputs[0], size_, y);
  const std::vector<int64_t> counts = numels(inputs[0]);
  const int64_t own = counts[static_cast<size_t>(rank_)];
  TORCH_CHECK_VALUE(own == y.numel(), operation.title, ": the output has ", y.numel(),
                    " elements, the input for this rank (", rank_, ") ", own);
  at::Tensor all = flat_input(operation, inputs[0], *allocator_);
  if (overlap(all, y)) all = operation.copy_of(all);
  pycoll_call& call = operation.add(PYCOLL_REDUCE_SCATTER, all);
  operation.set_reduction(call, opts.reduceOp, y.scalar_type());
  call.count = y.numel();
  call.input = all.data_ptr();
  call.output = y.data_ptr();
  if (!all_equal(counts)) call.block_counts = operation.keep_counts(counts).data();
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                const c10d::AllToAllOptions& opts) {
  Operation operation(OpType::ALLTOALL, "pycoll:all_to_all", opts.timeout);
  TORCH_CHECK_VALUE(!inputs.empty(), operation.title, ": no inputs");
  check_list(operation, inputs, size_, inputs[0]);
  check_list(operation, outputs, size_, inputs[0]);
  at::Tensor x = flat_input(operation, inputs, *allocator_);
  const at::Tensor y = flat_output(operation, outputs, *allocator_);
  if (overlap(x, y)) x = operation.copy_of(x);
  pycoll_call& call = operation.add(PYCOLL_ALL_TO_ALL, x);
  call.num_dims = 0;
  call.input = x.data_ptr();
  call.output = y.data_ptr();
  // Passed even if this rank's tensors have equal sizes: those of other ranks may differ.
  call.send_counts = operation.keep_counts(numels(inputs)).data();
  call.recv_counts = operation.keep_counts(numels(outputs)).data();
  return launch(std::move(operation), opts.asyncOp);
}

}  // namespace pycoll::torch_backend
