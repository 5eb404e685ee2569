// Lists of one tensor per rank as one flat buffer, as the core takes them.
#pragma once

#include <vector>

#include "torch/bridge/operation.h"

namespace pycoll::torch_backend {

/// Numbers of elements of each tensor.
std::vector<int64_t> numels(const std::vector<at::Tensor>& tensors);
bool all_equal(const std::vector<int64_t>& counts);

/// A flat tensor with the concatenated elements of all tensors: the list's own memory where the
/// tensors are adjacent, else a copy.
at::Tensor flat_input(Operation& operation, const std::vector<at::Tensor>& tensors,
                      SharedAllocator& allocator);
/// A flat tensor for the results, like flat_input(). If it is not the list's own memory, finish()
/// copies it to the tensors. Raises ValueError when two of the tensors share memory.
at::Tensor flat_output(Operation& operation, const std::vector<at::Tensor>& tensors,
                       SharedAllocator& allocator);

/// Raises ValueError unless the list has one valid tensor per rank, each with the dtype of `like`.
void check_list(Operation& operation, const std::vector<at::Tensor>& tensors, int num_ranks,
                const at::Tensor& like);

}  // namespace pycoll::torch_backend
