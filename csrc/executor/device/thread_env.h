// ThreadEnv: how std::threads act as one block of a GPU, with __syncthreads as a barrier. It exists
// so that the control flow of the kernels runs, under ThreadSanitizer too, on machines without a
// GPU: who waits, who posts, what is read between which barriers.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>

#include "base/clock.h"

namespace pycoll {

/// What the threads of one block share.
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
  /// As __syncthreads_and.
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
  std::atomic<bool> failed_{false};  // stays true: a failed launch is over
};

/// One thread of a block.
class ThreadEnv {
 public:
  /// Threads that share a line of 128 bytes. A warp's lanes come without a barrier, threads do not.
  static constexpr int kLineTeam = 1;
  /// Looks at a condition before a thread looks for trouble; it may be what it waits for that needs
  /// this core.
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
