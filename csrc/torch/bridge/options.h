// What init_process_group(pg_options=) may say.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "torch/bridge/tensor_cache.h"

namespace pycoll::torch_backend {

struct BackendOptions : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("pycoll", timeout) {}

  // Bits of results depend on the values and their order of ranks alone. Alike on all ranks.
  bool deterministic = false;
  // So many uses of one tensor later, its memory is moved to where peers reach it without a copy.
  // 0: never.
  int register_after = default_register_after();
};

}  // namespace pycoll::torch_backend
