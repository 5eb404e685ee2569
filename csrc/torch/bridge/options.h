// Options of init_process_group(pg_options=).
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "torch/bridge/tensor_cache.h"

namespace pycoll::torch_backend {

struct BackendOptions : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("pycoll", timeout) {}

  // Result bits depend on the values and the order of ranks alone. Identical on all ranks.
  bool deterministic = false;
  // Number of uses after which a tensor's memory is registered for access without a copy. 0: never.
  int register_after = default_register_after();
};

}  // namespace pycoll::torch_backend
