#include "kernels/cuda/cuda_status.h"

#include <string>

#include "kernels/cuda/cuda_driver.h"

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
  const auto get_name = find_driver_function<decltype(&::cuGetErrorName)>("cuGetErrorName");
  const char* name = nullptr;
  if (get_name != nullptr && get_name(status, &name) == CUDA_SUCCESS) {
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
