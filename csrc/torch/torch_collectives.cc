// Collectives of one tensor per rank.
#include <ATen/ATen.h>

#include "torch/backend.h"

namespace pycoll::torch_backend {
namespace {

using c10d::OpType;

void check_like(const at::Tensor& output, const at::Tensor& input, const char* what) {
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), what, ": the output has dtype ",
                    output.scalar_type(), ", expected that of the input, ", input.scalar_type());
}

void check_root(int64_t root, int num_ranks, const char* what) {
  TORCH_CHECK_VALUE(root >= 0 && root < num_ranks, what, ": root is ", root,
                    ", expected a rank of 0..", num_ranks - 1);
}

/// Numbers of elements to or from each rank, for rows that are cut by `splits`.
std::vector<int64_t> counts_of(const std::vector<int64_t>& splits, const at::Tensor& tensor,
                               int num_ranks, const char* which) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<int64_t> counts = splits;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % num_ranks == 0, "pycoll:all_to_all: ", which, " has ", rows,
                      " rows (its first axis), expected a multiple of the ", num_ranks,
                      " ranks, or split sizes");
    counts.assign(static_cast<size_t>(num_ranks), rows / num_ranks);
  }
  TORCH_CHECK_VALUE(counts.size() == static_cast<size_t>(num_ranks),
                    "pycoll:all_to_all: ", counts.size(), " split sizes of the ", which,
                    ", expected one for each of the ", num_ranks, " ranks");
  const int64_t sum = c10::sum_integers(counts);
  TORCH_CHECK_VALUE(sum == rows, "pycoll:all_to_all: the split sizes of the ", which, " add up to ",
                    sum, " rows, expected ", rows, " (its first axis)");
  for (int64_t& count : counts) count *= rows == 0 ? 0 : tensor.numel() / rows;
  return counts;
}

}  // namespace

WorkPtr PycollBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (only(tensors, "pycoll:all_reduce").is_sparse()) return allreduce_sparse(tensors, opts);
  Operation operation(OpType::ALLREDUCE, "pycoll:all_reduce", opts.timeout);
  const at::Tensor x = operation.in_out(tensors[0]);
  pycoll_call& call = operation.add(PYCOLL_ALL_REDUCE, x);
  operation.set_reduction(call, opts.reduceOp, x.scalar_type());
  call.input = call.output = x.data_ptr();
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Operation operation(OpType::BROADCAST, "pycoll:broadcast", opts.timeout);
  check_root(opts.rootRank, size_, operation.title);
  const at::Tensor& tensor = only(tensors, operation.title);
  const bool at_root = rank_ == opts.rootRank;
  const at::Tensor x = at_root ? operation.input(tensor) : operation.output(tensor);
  if (at_root) {
    operation.outputs.push_back(tensor);
  } else {
    operation.note(tensor);
  }
  pycoll_call& call = operation.add(PYCOLL_BROADCAST, x);
  call.root = static_cast<int32_t>(opts.rootRank);
  call.input = call.output = x.data_ptr();
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Operation operation(OpType::REDUCE, "pycoll:reduce", opts.timeout);
  check_root(opts.rootRank, size_, operation.title);
  const at::Tensor& tensor = only(tensors, operation.title);
  const bool at_root = rank_ == opts.rootRank;
  const at::Tensor x = at_root ? operation.in_out(tensor) : operation.input(tensor);
  if (!at_root) operation.outputs.push_back(tensor);
  pycoll_call& call = operation.add(PYCOLL_REDUCE, x);
  operation.set_reduction(call, opts.reduceOp, x.scalar_type());
  call.root = static_cast<int32_t>(opts.rootRank);
  call.input = x.data_ptr();
  call.output = at_root ? x.data_ptr() : nullptr;
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& opts) {
  Operation operation(OpType::_ALLGATHER_BASE, "pycoll:all_gather_into_tensor", opts.timeout);
  add_all_gather(operation, output, input);
  return launch(std::move(operation), opts.asyncOp);
}

void PycollBackend::add_all_gather(Operation& operation, const at::Tensor& output,
                                   const at::Tensor& input) const {
  check_like(output, input, operation.title);
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, operation.title, ": the output has ",
                    output.numel(), " elements, expected ", input.numel(), " for each of the ",
                    size_, " ranks");
  at::Tensor x = operation.input(input);
  const at::Tensor all = operation.output(output);
  auto* const own_block = static_cast<std::byte*>(all.data_ptr()) + rank_ * x.nbytes();
  if (x.data_ptr() != own_block && overlap(all, x)) x = operation.copy_of(x);
  pycoll_call& call = operation.add(PYCOLL_ALL_GATHER, x);
  call.input = x.data_ptr();
  call.output = all.data_ptr();
}

WorkPtr PycollBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& opts) {
  Operation operation(OpType::_REDUCE_SCATTER_BASE, "pycoll:reduce_scatter_tensor", opts.timeout);
  add_reduce_scatter(operation, output, input, opts.reduceOp);
  return launch(std::move(operation), opts.asyncOp);
}

void PycollBackend::add_reduce_scatter(Operation& operation, const at::Tensor& output,
                                       const at::Tensor& input, const c10d::ReduceOp& op) const {
  check_like(output, input, operation.title);
  TORCH_CHECK_VALUE(input.numel() == output.numel() * size_, operation.title, ": the input has ",
                    input.numel(), " elements, expected ", output.numel(), " for each of the ",
                    size_, " ranks");
  at::Tensor x = operation.input(input);
  const at::Tensor part = operation.output(output);
  auto* const own_block = static_cast<std::byte*>(x.data_ptr()) + rank_ * part.nbytes();
  if (part.data_ptr() != own_block && overlap(x, part)) x = operation.copy_of(x);
  pycoll_call& call = operation.add(PYCOLL_REDUCE_SCATTER, x);
  operation.set_reduction(call, op, x.scalar_type());
  call.count = part.numel();
  call.input = x.data_ptr();
  call.output = part.data_ptr();
}

WorkPtr PycollBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                     std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits,
                                     const c10d::AllToAllOptions& opts) {
  Operation operation(OpType::ALLTOALL_BASE, "pycoll:all_to_all_single", opts.timeout);
  check_like(output, input, operation.title);
  const at::Tensor x = operation.input(input);
  const at::Tensor y = operation.output(output);
  const std::vector<int64_t> send_counts = counts_of(input_splits, x, size_, "input");
  const std::vector<int64_t> recv_counts = counts_of(output_splits, y, size_, "output");
  TORCH_CHECK_VALUE(!overlap(x, y), operation.title, ": the output overlaps the input");
  pycoll_call& call = operation.add(PYCOLL_ALL_TO_ALL, x);
  call.input = x.data_ptr();
  call.output = y.data_ptr();
  if (input_splits.empty() && output_splits.empty()) {
    TORCH_CHECK_VALUE(x.numel() == y.numel(), operation.title, ": the output has ", y.numel(),
                      " elements, the input ", x.numel(), ": pass split sizes");
    call.count = send_counts[0];
  } else {
    call.send_counts = operation.keep_counts(send_counts).data();
    call.recv_counts = operation.keep_counts(recv_counts).data();
  }
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::barrier(const c10d::BarrierOptions& opts) {
  Operation operation(OpType::BARRIER, "pycoll:barrier", opts.timeout);
  const bool on_device = opts.device && !opts.device->is_cpu();
  // A barrier on a device waits for the work that is queued on its current stream.
  at::Tensor token;
  if (on_device)
    token = operation.in_out(at::empty({1}, at::TensorOptions(*opts.device).dtype(at::kByte)));
  pycoll_call& call = operation.add(PYCOLL_BARRIER);
  call.dtype = PYCOLL_U8;
  call.op = PYCOLL_MAX;
  call.count = 1;
  call.input = call.output = on_device ? token.data_ptr() : &barrier_token_;
  return launch(std::move(operation), opts.asyncOp);
}

}  // namespace pycoll::torch_backend
