// CudaEnv: the team of threads of a GPU block.
#pragma once

#include <cstdint>

#include "base/macros.h"
#include "executor/device/device_launch.h"
#include "transport/ring/device_slot.h"

namespace pycoll {

// These functions compile for both sides, as their callers do; the CPU side has no team.
#ifdef __CUDA_ARCH__
#define PYCOLL_DEVICE_ONLY(expression, otherwise) expression
#else
#define PYCOLL_DEVICE_ONLY(expression, otherwise) otherwise
#endif

class CudaEnv {
 public:
  /// Neighbouring lanes of a warp that share a line of 128 bytes, 16 bytes each.
  static constexpr int kLineTeam = 8;
  /// Threads that share a part of a phase's bytes.
  static constexpr int kWarp = kDeviceWarp;
  /// Number of polls, of a few hundred cycles each, before a thread checks for trouble, which reads
  /// the host's memory and takes a microsecond.
  static constexpr int kSpins = 512;

  PYCOLL_HD int thread_index() const {
    return PYCOLL_DEVICE_ONLY(static_cast<int>(threadIdx.x), 0);
  }
  PYCOLL_HD int num_threads() const { return PYCOLL_DEVICE_ONLY(static_cast<int>(blockDim.x), 1); }
  PYCOLL_HD void sync() const { PYCOLL_DEVICE_ONLY(__syncthreads(), void()); }
  PYCOLL_HD bool agree(bool ready) const {
    return PYCOLL_DEVICE_ONLY(__syncthreads_and(ready) != 0, ready);
  }
  /// True when `value` is true on all lanes that share a line; all of them must call it together.
  PYCOLL_HD bool all_of_line(bool value) const {
    return PYCOLL_DEVICE_ONLY(__all_sync(line_mask(), value) != 0, value);
  }
  PYCOLL_HD bool any_of_line(bool value) const {
    return PYCOLL_DEVICE_ONLY(__any_sync(line_mask(), value) != 0, value);
  }
  /// The lanes' accesses of one line, by one instruction of the warp.
  PYCOLL_HD device::Word16 load_of_line(const void* from) const {
    return device::load_relaxed16(from);
  }
  PYCOLL_HD void store_of_line(void* to, device::Word16 words) const {
    device::store_relaxed16(to, words);
  }
  /// The device's wall clock, in steps of up to a microsecond.
  PYCOLL_HD int64_t clock_ns() const {
    uint64_t now = 0;
    PYCOLL_DEVICE_ONLY(asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)), void());
    return static_cast<int64_t>(now);
  }
  PYCOLL_HD void relax() const {}

 private:
  PYCOLL_HD static unsigned line_mask() {
    return PYCOLL_DEVICE_ONLY(0xffu << (threadIdx.x & 24u), 0);
  }
};
#undef PYCOLL_DEVICE_ONLY

}  // namespace pycoll
