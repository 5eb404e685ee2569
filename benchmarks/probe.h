// Kernels of a benchmark, beside those of the library: blocks of a GPU where nvcc compiles this,
// else threads of the CPU, as on the emulated device.
//
// A kernel is a `Work` of plain data: work(env, block, shared) is called by each thread;
// Work::Shared is memory that the threads of a block share, without constructors.
#pragma once

#include <cstddef>

#include "device/device.h"
#include "executor/device/device_launch.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include "base/error.h"
#include "executor/device/cuda_env.cuh"
#else
#include <memory>
#include <vector>

#include "executor/device/thread_env.h"
#include "kernels/threads/thread_pool.h"
#endif

namespace pycoll {

#ifdef __CUDACC__
using ProbeEnv = CudaEnv;

template <class Work>
__global__ void __launch_bounds__(kMaxDeviceThreads, 1)
    probe_kernel(const __grid_constant__ Work work) {
  __shared__ alignas(16) std::byte memory[sizeof(typename Work::Shared)];
  work(ProbeEnv(), static_cast<int>(blockIdx.x), *reinterpret_cast<typename Work::Shared*>(memory));
}

/// One launch whose blocks are all resident.
template <class Work>
void launch_probe(const Device&, const Work& work, int num_blocks, int num_threads,
                  DeviceStream stream) {
  void* arguments[] = {const_cast<Work*>(&work)};
  const cudaError_t status = cudaLaunchCooperativeKernel(
      reinterpret_cast<const void*>(&probe_kernel<Work>), dim3(static_cast<unsigned>(num_blocks)),
      dim3(static_cast<unsigned>(num_threads)), arguments, 0, static_cast<cudaStream_t>(stream));
  if (status != cudaSuccess) throw CudaError(cudaGetErrorString(status));
}
#else
using ProbeEnv = ThreadEnv;

/// Waits for the stream, and returns when the kernel is over: a stream of the emulated device has
/// no kernels but the library's.
template <class Work>
void launch_probe(const Device& device, const Work& work, int num_blocks, int num_threads,
                  DeviceStream stream) {
  struct Block {
    explicit Block(int num) : team(num), memory(sizeof(typename Work::Shared)) {}
    ThreadTeam team;
    std::vector<std::byte> memory;
  };
  device.synchronize(stream);
  std::vector<std::unique_ptr<Block> > blocks;
  for (int i = 0; i < num_blocks; ++i) blocks.push_back(std::make_unique<Block>(num_threads));
  ThreadPool pool;
  pool.run(num_blocks * num_threads, [&](int index) {
    const int block = index / num_threads;
    Block& own = *blocks[static_cast<size_t>(block)];
    work(ProbeEnv(own.team, index % num_threads), block,
         *reinterpret_cast<typename Work::Shared*>(own.memory.data()));
  });
}
#endif

}  // namespace pycoll
