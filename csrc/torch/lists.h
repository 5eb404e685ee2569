// Lists of one tensor per rank as one flat buffer, which is what the core moves.
#pragma once

#include <vector>

#include "torch/bridge/operation.h"

namespace pycoll::torch_backend {

/// Numbers of elements of each tensor.
std::vector<int64_t> numels(const std::vector<at::Tensor>& tensors);
bool all_equal(const std::vector<int64_t>& counts);

/// A flat tensor with the elements of all, one behind the other. It is the list's own memory where
/// the tensors lie so, else a copy.
at::Tensor flat_input(Operation& operation, const std::vector<at::Tensor>& tensors,
                      SharedAllocator& allocator);
/// The same for results: they are copied to the tensors in finish(), where need be. Raises
/// ValueError when two of them share memory.
at::Tensor flat_output(Operation& operation, const std::vector<at::Tensor>& tensors,
                       SharedAllocator& allocator);

/// Raises ValueError unless there is one tensor per rank that the operation can have, all of the
/// type of `like`.
void check_list(Operation& operation, const std::vector<at::Tensor>& tensors, int num_ranks,
                const at::Tensor& like);

}  // namespace pycoll::torch_backend
