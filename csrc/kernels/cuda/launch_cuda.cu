#include <cuda_runtime.h>

#include <climits>

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

/// What the current device can do with a launch (sm_90).
struct LaunchFeatures {
  bool remote_domain = false;  // keeps the stores of some kernels apart from those of others
  bool early_start = false;    // a kernel starts before the one in front of it has ended
};

cudaError_t find_features(LaunchFeatures& features) {
  int device = 0;
  int num_domains = 1;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_domains, cudaDevAttrMemSyncDomainCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  features = {num_domains > 1, major >= 9};
  return error;
}

/// Launches `num_blocks` blocks with the arguments of run_kernel.
cudaError_t launch_blocks(const DeviceLaunch& launch, const DeviceLaunch* launches, int num_blocks,
                          bool cooperative, void* stream) {
  const void* const kernel = kernel_of(launch.protocol, launch.dtype);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  LaunchFeatures features;
  const cudaError_t error = find_features(features);
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
  } else if (features.early_start) {
    // The start of the blocks overlaps the end of the kernel in front; run_as_block waits for it.
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (features.remote_domain) {
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

/// Calls visit(kernel) for all kernels of operations; returns the first error.
template <class Visit>
cudaError_t for_each_kernel(Visit&& visit) {
  for (int protocol = 0; protocol < kNumDeviceProtocols; ++protocol) {
    for (const void* kernel : all_kernels()[protocol].kernels) {
      if (kernel == nullptr) continue;
      const cudaError_t error = visit(kernel);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

/// Thread i stores word i.
__global__ void store_words_kernel(const __grid_constant__ DeviceWords words) {
  const auto i = static_cast<int>(threadIdx.x);
  if (i < words.num) device::store_release(*words.at[i], words.value[i]);
}

/// Thread i polls word i.
__global__ void await_words_kernel(const __grid_constant__ DeviceWords words, int64_t timeout_ns,
                                   uint64_t* found) {
  const auto i = static_cast<int>(threadIdx.x);
  if (i >= words.num) return;
  const CudaEnv env;
  const int64_t deadline = env.clock_ns() + timeout_ns;
  uint64_t value = 0;
  do {
    value = device::load_acquire(*words.at[i]);
  } while (value != words.value[i] && env.clock_ns() < deadline);
  device::store_relaxed(found[i], value);
}

}  // namespace

int launch_on_cuda(const DeviceLaunch& launch, void* stream) {
  return launch_blocks(launch, nullptr, launch.num_channels, false, stream);
}

int launch_together_on_cuda(const DeviceLaunch& first, const DeviceLaunch* launches,
                            int num_launches, void* stream) {
  return launch_blocks(first, launches, num_launches * first.num_channels, true, stream);
}

int max_resident_blocks_on_cuda(int num_threads, int* num_blocks) {
  *num_blocks = 0;
  int device = 0;
  int num_processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  int fewest = INT_MAX;  // on a multiprocessor
  error = for_each_kernel([&](const void* kernel) {
    int num = 0;
    const cudaError_t status =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&num, kernel, num_threads, 0);
    fewest = num < fewest ? num : fewest;
    return status;
  });
  if (error == cudaSuccess) *num_blocks = fewest * num_processors;
  return error;
}

int preload_on_cuda() {
  return for_each_kernel([](const void* kernel) {
    // Reading a kernel's attributes loads it.
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
  });
}

int store_words_on_cuda(const DeviceWords& words, void* stream) {
  store_words_kernel<<<1, DeviceWords::kMax, 0, static_cast<cudaStream_t>(stream)>>>(words);
  return cudaGetLastError();
}

int await_words_on_cuda(const DeviceWords& words, int64_t timeout_ns, uint64_t* found,
                        void* stream) {
  await_words_kernel<<<1, DeviceWords::kMax, 0, static_cast<cudaStream_t>(stream)>>>(
      words, timeout_ns, found);
  return cudaGetLastError();
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
