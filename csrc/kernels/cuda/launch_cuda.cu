#include <cuda_runtime.h>

#include "kernels/cuda/cuda_kernels.cuh"
#include "kernels/cuda/launch_cuda.h"
#include "reduce/scaled.h"

namespace pycoll {
namespace {

/// The kernels of all protocols. Made once, since the table only holds addresses of host stubs.
const CudaKernels* all_kernels() {
  static const CudaKernels kernels[kNumDeviceProtocols] = {
      cuda_kernels<DeviceProtocol::kSimple>(), cuda_kernels<DeviceProtocol::kLL>(),
      cuda_kernels<DeviceProtocol::kLL128>(), cuda_kernels<DeviceProtocol::kPoison>(),
      cuda_kernels<DeviceProtocol::kDirect>()};
  return kernels;
}

const void* kernel_of(DeviceProtocol protocol, DType dtype) {
  if (dtype == DType::kOpaque) return nullptr;
  return all_kernels()[static_cast<size_t>(protocol)].kernels[static_cast<size_t>(dtype)];
}

/// Whether the current device keeps the stores of some kernels apart from those of others (sm_90).
cudaError_t has_remote_domain(bool& has) {
  int device = 0;
  int num_domains = 1;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_domains, cudaDevAttrMemSyncDomainCount, device);
  }
  has = num_domains > 1;
  return error;
}

/// Launches `num_blocks` blocks with the arguments of run_kernel.
cudaError_t launch_blocks(const DeviceLaunch& launch, const DeviceLaunch* launches, int num_blocks,
                          bool cooperative, void* stream) {
  const void* const kernel = kernel_of(launch.protocol, launch.dtype);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  bool remote = false;
  const cudaError_t error = has_remote_domain(remote);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(launch.num_threads));
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (cooperative) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  if (remote) {
    // A fence of system scope waits for the stores of its own domain only, not for those of the
    // compute kernels beside it.
    attributes[config.numAttrs].id = cudaLaunchAttributeMemSyncDomain;
    attributes[config.numAttrs++].val.memSyncDomain = cudaLaunchMemSyncDomainRemote;
  }
  void* arguments[] = {const_cast<DeviceLaunch*>(&launch), &launches};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

template <DType dtype>
__global__ void __launch_bounds__(256)
    scale_kernel(std::byte* dst, const std::byte* src, int64_t count, double factor) {
  using Traits = DeviceTraits<dtype>;
  using Storage = typename Traits::Storage;
  using Element = Pack<Storage, 1>;
  const bool aligned = is_aligned(src, sizeof(Storage)) && is_aligned(dst, sizeof(Storage));
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const auto at = i * static_cast<int64_t>(sizeof(Storage));
    const Element from = aligned ? load_pack<Element>(src + at) : load_bytes<Element>(src + at);
    const Element to{{Traits::store(scaled(Traits::load(from.x[0]), factor))}};
    if (aligned) {
      store_pack(dst + at, to);
    } else {
      store_bytes(dst + at, to);
    }
  }
}

template <DType dtype>
cudaError_t scale(void* dst, const void* src, int64_t count, double factor, cudaStream_t stream) {
  if constexpr (!supported(dtype, Op::kPremul)) {
    return cudaErrorInvalidValue;
  } else {
    if (count == 0) return cudaSuccess;
    constexpr int kNumThreads = 256;
    constexpr int64_t kMaxBlocks = 1024;
    const int64_t needed = (count + kNumThreads - 1) / kNumThreads;
    const auto num_blocks = static_cast<unsigned>(needed < kMaxBlocks ? needed : kMaxBlocks);
    scale_kernel<dtype><<<num_blocks, kNumThreads, 0, stream>>>(
        static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), count, factor);
    return cudaGetLastError();
  }
}

}  // namespace

int launch_on_cuda(const DeviceLaunch& launch, void* stream) {
  return launch_blocks(launch, nullptr, launch.num_channels, false, stream);
}

int launch_together_on_cuda(const DeviceLaunch& first, const DeviceLaunch* launches,
                            int num_launches, void* stream) {
  return launch_blocks(first, launches, num_launches * first.num_channels, true, stream);
}

int max_resident_blocks_on_cuda(DeviceProtocol protocol, DType dtype, Op, int num_threads,
                                int* num_blocks) {
  *num_blocks = 0;
  const void* const kernel = kernel_of(protocol, dtype);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  int device = 0;
  int num_processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  int per_processor = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, num_threads, 0);
  if (error != cudaSuccess) return error;
  *num_blocks = per_processor * num_processors;
  return cudaSuccess;
}

int preload_on_cuda() {
  for (int protocol = 0; protocol < kNumDeviceProtocols; ++protocol) {
    for (const void* kernel : all_kernels()[protocol].kernels) {
      if (kernel == nullptr) continue;
      // Reading a kernel's attributes loads it.
      cudaFuncAttributes attributes;
      const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

int scale_on_cuda(void* dst, const void* src, int64_t count, DType dtype, double factor,
                  void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  switch (dtype) {
#define X(id, name, kind, type, acc) \
  case DType::id:                    \
    return scale<DType::id>(dst, src, count, factor, on);
    PYCOLL_FOR_EACH_DTYPE(X)
#undef X
    case DType::kOpaque:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace pycoll
