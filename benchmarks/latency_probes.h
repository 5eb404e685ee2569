// What gpu_latency measures besides whole collectives: launches, the flight of a flag, and what a
// device's memory gives to kernels that only read and write.
#pragma once

#include "executor/device/run_block.h"
#include "fixed_program.h"
#include "probe.h"
#include "reduce/reduce_copy_block.h"

#ifdef __CUDACC__
#include <cuda/atomic>
#endif

namespace pycoll {

struct NothingShared {};

struct EmptyWork {
  using Shared = NothingShared;
  PYCOLL_HD void operator()(const ProbeEnv&, int, Shared&) const {}
};

/// As many arguments as a launch of the library has.
struct ArgumentsWork {
  using Shared = NothingShared;
  PYCOLL_HD void operator()(const ProbeEnv& env, int, Shared&) const {
    if (never != nullptr) *never = words[env.thread_index()];
  }
  uint64_t words[256];
  uint64_t* never;
};

/// A flag and its answer, `rounds` times between two blocks of one thread each. `system`: with the
/// scope of the library's flags, which other GPUs and the CPU may read; else of this GPU alone.
template <bool system>
struct PingPongWork {
  using Shared = NothingShared;
  static constexpr int kFlagsApart = static_cast<int>(kDeviceAlignment / sizeof(uint64_t));

  PYCOLL_HD void operator()(const ProbeEnv& env, int block, Shared&) const {
    uint64_t& own = flags[block * kFlagsApart];
    const uint64_t& other = flags[(1 - block) * kFlagsApart];
    for (uint64_t i = first; i < first + static_cast<uint64_t>(rounds); ++i) {
      if (block == 0) store(own, i);
      while (load(other) < i) env.relax();
      if (block == 1) store(own, i);
    }
  }
  static PYCOLL_HD uint64_t load(const uint64_t& word) {
#ifdef __CUDA_ARCH__
    if constexpr (!system) {
      using Ref = cuda::atomic_ref<uint64_t, cuda::thread_scope_device>;
      return Ref(const_cast<uint64_t&>(word)).load(cuda::memory_order_acquire);
    }
#endif
    return device::load_acquire(word);
  }
  static PYCOLL_HD void store(uint64_t& word, uint64_t value) {
#ifdef __CUDA_ARCH__
    if constexpr (!system) {
      using Ref = cuda::atomic_ref<uint64_t, cuda::thread_scope_device>;
      return Ref(word).store(value, cuda::memory_order_release);
    }
#endif
    device::store_release(word, value);
  }

  uint64_t* flags;  // two, each at a multiple of kDeviceAlignment; less than `first`
  uint64_t first;
  int rounds;
};

/// The sum of n arrays into m arrays, by the loop of `direct` without its waits: what n ranks that
/// share a device can reach at most.
template <DType dtype>
struct StreamsWork {
  using Shared = BlockOperands;
  static constexpr int64_t kTile = 64 << 10;

  PYCOLL_HD void operator()(const ProbeEnv& env, int block, Shared& operands) const {
    for (int64_t at = block * kTile; at < nbytes; at += num_blocks * kTile) {
      for (int i = env.thread_index(); i < num_srcs + num_dsts; i += env.num_threads()) {
        std::byte* array = arrays + i * nbytes + at;
        if (i < num_srcs) {
          operands.srcs[i] = array;
        } else {
          operands.dsts[i - num_srcs] = array;
        }
      }
      env.sync();
      const int64_t left = nbytes - at;
      BlockReduce<dtype>({operands.srcs, num_srcs, operands.dsts, num_dsts},
                         combining_op(dtype, Op::kSum), 1, env.thread_index(), env.num_threads())
          .run(0, static_cast<int32_t>(left < kTile ? left : kTile));
      env.sync();  // every thread has read where the operands lie
    }
  }

  std::byte* arrays;
  int64_t nbytes;  // of each array
  int num_srcs;
  int num_dsts;
  int num_blocks;
};

/// All ranks of an all_reduce by `ll`, interpreted or with the program as a constant.
template <class Algorithm, int n, bool fixed>
struct ProgramWork {
  static constexpr int kNumWords = sizeof(DeviceLaunch) / sizeof(uint64_t);
  struct Shared {
    BlockShared block;
    uint64_t words[kNumWords];
  };

  PYCOLL_HD void operator()(const ProbeEnv& env, int block, Shared& shared) const {
    const auto* from = reinterpret_cast<const uint64_t*>(launches + block / num_channels);
    for (int i = env.thread_index(); i < kNumWords; i += env.num_threads()) {
      shared.words[i] = from[i];
    }
    env.sync();
    const auto& own = *reinterpret_cast<const DeviceLaunch*>(shared.words);
    if constexpr (fixed) {
      run_rank<0>(env, own, block % num_channels, shared.block);
    } else {
      BlockRun<DeviceProtocol::kLL, DType::kF32, ProbeEnv>(env, own, block % num_channels,
                                                           shared.block)
          .run();
    }
  }
  template <int rank>
  static PYCOLL_HD void run_rank(const ProbeEnv& env, const DeviceLaunch& own, int channel,
                                 BlockShared& shared) {
    if (own.rank == rank) {
      using Fixed = FixedProgram<Algorithm, n, rank>;
      BlockRun<DeviceProtocol::kLL, DType::kF32, ProbeEnv, Fixed>(env, own, channel, shared).run();
    } else if constexpr (rank + 1 < n) {
      run_rank<rank + 1>(env, own, channel, shared);
    }
  }

  const DeviceLaunch* launches;
  int num_channels;
};

}  // namespace pycoll
