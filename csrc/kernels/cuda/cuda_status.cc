#include "kernels/cuda/cuda_status.h"

#include <string>

namespace pycoll {
namespace {

thread_local std::string last_error_text;

}  // namespace

int cuda_status(cudaError_t status) {
  if (status == cudaSuccess) return 0;
  last_error_text = std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
  (void)cudaGetLastError();
  return static_cast<int>(status);
}

int driver_status(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return 0;
  last_error_text = std::string(what) + ": CUDA driver error " + std::to_string(status);
  // Not linked against the driver, so its function is found at run time.
  using GetErrorName = CUresult (*)(CUresult, const char**);
  void* found = nullptr;
  cudaDriverEntryPointQueryResult answer{};
  const char* name = nullptr;
  if (cudaGetDriverEntryPointByVersion("cuGetErrorName", &found, 12000, cudaEnableDefault,
                                       &answer) == cudaSuccess &&
      answer == cudaDriverEntryPointSuccess &&
      reinterpret_cast<GetErrorName>(found)(status, &name) == CUDA_SUCCESS) {
    last_error_text += std::string(" (") + name + ")";
  }
  return static_cast<int>(status);
}

int cuda_refuse(const char* why) {
  last_error_text = why;
  return 1;
}

const char* cuda_last_error() { return last_error_text.c_str(); }

}  // namespace pycoll
