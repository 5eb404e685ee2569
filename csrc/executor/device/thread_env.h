// ThreadEnv: std::threads that act as one block of a GPU, with a barrier for __syncthreads. It lets
// the kernels' control flow (waits, posts, reads between barriers) run on machines without a GPU,
// also under ThreadSanitizer.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>

#include "base/clock.h"

namespace pycoll {

/// State shared by the threads of one block.
class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads) : num_threads_(num_threads) {
    pthread_barrier_init(&barrier_, nullptr, static_cast<unsigned>(num_threads));
  }
  ~ThreadTeam() { pthread_barrier_destroy(&barrier_); }
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int num_threads() const { return num_threads_; }
  void sync() { pthread_barrier_wait(&barrier_); }
  /// Equivalent of __syncthreads_and.
  bool agree(bool ready) {
    if (!ready) failed_.store(true, std::memory_order_relaxed);
    sync();
    const bool all = !failed_.load(std::memory_order_relaxed);
    sync();
    return all;
  }

 private:
  int num_threads_;
  pthread_barrier_t barrier_;
  std::atomic<bool> failed_{false};  // never reset: a failed launch ends
};

/// One thread of a block.
class ThreadEnv {
 public:
  /// Threads that share a line of 128 bytes: one, since unlike a warp's lanes they need a barrier.
  static constexpr int kLineTeam = 1;
  /// Number of polls before a thread checks for trouble; small, as the awaited thread may need this
  /// core.
  static constexpr int kSpins = 64;

  ThreadEnv(ThreadTeam& team, int thread_index) : team_(team), thread_index_(thread_index) {}

  int thread_index() const { return thread_index_; }
  int num_threads() const { return team_.num_threads(); }
  void sync() const { team_.sync(); }
  bool agree(bool ready) const { return team_.agree(ready); }
  bool all_of_line(bool value) const { return value; }
  bool any_of_line(bool value) const { return value; }
  int64_t clock_ns() const { return now_ns(); }
  void relax() const { sched_yield(); }

 private:
  ThreadTeam& team_;
  int thread_index_;
};

}  // namespace pycoll
