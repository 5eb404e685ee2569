// Compares the conversions by a GPU's instructions (reduce/device_traits.h) with the CPU's, for
// every code of the small floats and for every f32.
#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.h"
#include "reduce/device_traits.h"

namespace pycoll {
namespace {

template <DType dtype>
__global__ void check_conversions_kernel(unsigned long long* num_differences) {
  using Native = DeviceTraits<dtype>;
  using Written = DTypeTraits<dtype>;
  using Storage = typename Written::Storage;
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  unsigned long long differences = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i >> 32 == 0; i += stride) {
    const float x = canonical(bits_as<float>(static_cast<uint32_t>(i)));
    if (Native::store(x) != Written::store(x)) ++differences;
    if (i >> (8 * sizeof(Storage)) == 0) {
      const auto code = static_cast<Storage>(i);
      // Which NaN a code becomes does not matter: a reduction replaces it by the canonical one.
      const float native = canonical(static_cast<float>(Native::load(code)));
      const float written = canonical(static_cast<float>(Written::load(code)));
      if (bits_as<uint32_t>(native) != bits_as<uint32_t>(written)) ++differences;
    }
  }
  if (differences != 0) atomicAdd(num_differences, differences);
}

}  // namespace

int check_conversions_on_cuda(uint64_t* num_differences) {
  unsigned long long* found = nullptr;
  cudaError_t error = cudaMalloc(&found, sizeof(*found));
  if (error != cudaSuccess) return error;
  error = cudaMemset(found, 0, sizeof(*found));
  if (error == cudaSuccess) {
    check_conversions_kernel<DType::kF16><<<1024, 256>>>(found);
    check_conversions_kernel<DType::kBF16><<<1024, 256>>>(found);
    check_conversions_kernel<DType::kF8E4M3><<<1024, 256>>>(found);
    check_conversions_kernel<DType::kF8E5M2><<<1024, 256>>>(found);
    error = cudaGetLastError();
  }
  unsigned long long on_host = 0;
  if (error == cudaSuccess) {
    error = cudaMemcpy(&on_host, found, sizeof(on_host), cudaMemcpyDeviceToHost);
  }
  *num_differences = on_host;
  cudaFree(found);
  return error;
}

}  // namespace pycoll

extern "C" __attribute__((visibility("default"))) int pycoll_check_conversions(
    uint64_t* num_differences) {
  return pycoll::check_conversions_on_cuda(num_differences);
}
