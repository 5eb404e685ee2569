// The kernels on a GPU, one table of them per protocol.
#pragma once

#include "executor/device/cuda_env.cuh"
#include "executor/device/run_block.h"

namespace pycoll {

/// Runs a block per channel, of one rank, whose launch is `launch`, or of several ranks on this
/// GPU, whose launches lie at `launches`. Each block first copies its launch to shared memory,
/// because the launch is read often and with run-time indices. Then calls run(launch, channel,
/// shared).
template <class Run>
__device__ void run_as_block(const DeviceLaunch& launch, const DeviceLaunch* launches, Run&& run) {
  constexpr int kNumWords = sizeof(DeviceLaunch) / sizeof(uint64_t);
  static_assert(sizeof(DeviceLaunch) % sizeof(uint64_t) == 0);
  // Raw bytes, because constructors do not run for shared memory.
  __shared__ alignas(16) std::byte memory[sizeof(BlockShared)];
  auto& shared = *reinterpret_cast<BlockShared*>(memory);
  __shared__ uint64_t words[kNumWords];
  const auto block = static_cast<int>(blockIdx.x);
  const int num_channels = launch.num_channels;
  const DeviceLaunch* mine = launches == nullptr ? &launch : launches + block / num_channels;
  const auto* from = reinterpret_cast<const uint64_t*>(mine);
  for (unsigned i = threadIdx.x; i < kNumWords; i += blockDim.x) words[i] = from[i];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Until here the block has read arguments only, so it may start before the kernel in front of it
  // on the stream has ended (launch_cuda.cu).
  cudaGridDependencySynchronize();
#endif
  __syncthreads();
  run(*reinterpret_cast<const DeviceLaunch*>(words), block % num_channels, shared);
}

template <DeviceProtocol protocol, DType dtype>
__global__ void __launch_bounds__(kMaxDeviceThreads, 1)
    run_kernel(const __grid_constant__ DeviceLaunch launch, const DeviceLaunch* launches) {
  run_as_block(launch, launches, [](const DeviceLaunch& own, int channel, BlockShared& shared) {
    BlockRun<protocol, dtype, CudaEnv>(CudaEnv(), own, channel, shared).run();
  });
}

/// Kernels by dtype; null where there is none.
struct CudaKernels {
  const void* kernels[kNumDTypes];
};

template <DeviceProtocol protocol, DType dtype>
const void* cuda_kernel() {
  if constexpr (!has_kernel(protocol, dtype)) {
    return nullptr;
  } else {
    return reinterpret_cast<const void*>(&run_kernel<protocol, dtype>);
  }
}
template <DeviceProtocol protocol>
CudaKernels make_cuda_kernels() {
#define X(id, name, kind, type, acc) cuda_kernel<protocol, DType::id>(),
  return {{PYCOLL_FOR_EACH_DTYPE(X)}};
#undef X
}

/// The table of one protocol. CMake makes a file for each from cuda_kernels.cu.in, so that they
/// compile in parallel.
template <DeviceProtocol protocol>
CudaKernels cuda_kernels();
template <>
CudaKernels cuda_kernels<DeviceProtocol::kSimple>();
template <>
CudaKernels cuda_kernels<DeviceProtocol::kLL>();
template <>
CudaKernels cuda_kernels<DeviceProtocol::kLL128>();
template <>
CudaKernels cuda_kernels<DeviceProtocol::kPoison>();
template <>
CudaKernels cuda_kernels<DeviceProtocol::kDirect>();

}  // namespace pycoll
