// The sum of sparse tensors: every rank gathers all tensors and adds them.
#include <ATen/ATen.h>

#include "torch/backend.h"
#include "torch/lists.h"

namespace pycoll::torch_backend {

WorkPtr PycollBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr const char* kTitle = "pycoll:all_reduce_sparse";
  const at::Tensor& tensor = only(tensors, kTitle);
  TORCH_CHECK_VALUE(tensor.layout() == at::kSparse && tensor.device().is_cpu(), kTitle,
                    ": expected a sparse (coordinate) tensor on the CPU");
  TORCH_CHECK_VALUE(opts.reduceOp == c10d::ReduceOp::SUM, kTitle,
                    ": sparse tensors are reduced with SUM alone");
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.coalesce();
  const auto gather = [&](const at::Tensor& mine, const std::vector<int64_t>& lengths) {
    Tensors parts;
    for (const int64_t length : lengths) {
      std::vector<int64_t> sizes = mine.sizes().vec();
      sizes[0] = length;
      parts.push_back(at::empty(sizes, mine.options()));
    }
    Operation operation(c10d::OpType::_ALLREDUCE_SPARSE, kTitle, opts.timeout);
    add_all_gather_list(operation, parts, mine);
    run(std::move(operation));
    return at::cat(parts);
  };
  const std::vector<int64_t> ones(static_cast<size_t>(size_), 1);
  const at::Tensor nnz = gather(at::full({1}, own._nnz(), at::kLong), ones);
  const auto* const lengths = nnz.const_data_ptr<int64_t>();
  const std::vector<int64_t> of_ranks(lengths, lengths + size_);
  const at::Tensor indices = gather(own.indices().t().contiguous(), of_ranks);
  const at::Tensor values = gather(own.values(), of_ranks);
  const at::Tensor sum =
      at::sparse_coo_tensor(indices.t(), values, tensor.sizes(), tensor.options()).coalesce();
  tensor.sparse_resize_and_clear_(tensor.sizes(), tensor.sparse_dim(), tensor.dense_dim());
  tensor.copy_(sum);
  Operation over(c10d::OpType::_ALLREDUCE_SPARSE, kTitle, opts.timeout);
  over.outputs = {tensor};
  auto work =
      c10::make_intrusive<PycollWork>(rank_, std::move(over), sequence_, nullptr, std::nullopt);
  work->complete(nullptr);
  return work;
}

}  // namespace pycoll::torch_backend
