// Functions of the CUDA driver, found at run time, since this library is not linked against the
// driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace pycoll {

/// The driver's function, or null where the driver does not have it. CUDA 12.0 has all that are
/// asked for, with the signatures of its header.
template <class Function>
Function find_driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult answer{};
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &answer) !=
          cudaSuccess ||
      answer != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function>(found);
}

}  // namespace pycoll
