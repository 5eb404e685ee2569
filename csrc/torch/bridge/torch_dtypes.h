// torch's element types and reduction ops as the core's.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "capi/pycoll.h"

namespace pycoll::torch_backend {

/// The core's dtype of a torch type; PYCOLL_OPAQUE for types that the core only copies.
int dtype_of(at::ScalarType type);

struct Reduction {
  int op = PYCOLL_SUM;
  double factor = 1;
};

/// The core's op. Raises ValueError if it does not support elements of this type. `what` begins the
/// message.
Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType type, const char* what);

}  // namespace pycoll::torch_backend
