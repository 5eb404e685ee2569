// ThreadEnv: std::threads that act as one block of a GPU, with a barrier for __syncthreads. It lets
// the kernels' control flow (waits, posts, reads between barriers) run on machines without a GPU,
// also under ThreadSanitizer.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <vector>

#include "base/clock.h"
#include "transport/ring/device_slot.h"

namespace pycoll {

/// Threads that act as the lanes of a warp that share a line of 128 bytes, 16 bytes each.
class ThreadLine {
 public:
  static constexpr int kLanes = 8;

  ThreadLine() { pthread_barrier_init(&barrier_, nullptr, kLanes); }
  ~ThreadLine() { pthread_barrier_destroy(&barrier_); }
  ThreadLine(const ThreadLine&) = delete;

  /// Number of lanes whose value is true. All lanes must call it together.
  int count(int lane, bool value) {
    // Two rows of votes: a lane may vote again while another one still counts.
    int& row = rows_[lane];
    row = 1 - row;
    votes_[row][lane] = value;
    pthread_barrier_wait(&barrier_);
    int num = 0;
    for (const bool vote : votes_[row]) num += vote;
    return num;
  }

 private:
  pthread_barrier_t barrier_;
  bool votes_[2][kLanes] = {};
  int rows_[kLanes] = {};  // row of each lane's last vote
};

/// State shared by the threads of one block.
class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads)
      : num_threads_(num_threads), lines_(static_cast<size_t>(num_threads / ThreadLine::kLanes)) {
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
  /// The lanes that `thread_index` belongs to.
  ThreadLine& line(int thread_index) {
    return lines_[static_cast<size_t>(thread_index / ThreadLine::kLanes)];
  }

 private:
  int num_threads_;
  std::vector<ThreadLine> lines_;
  pthread_barrier_t barrier_;
  std::atomic<bool> failed_{false};  // never reset: a failed launch ends
};

/// One thread of a block.
class ThreadEnv {
 public:
  /// Threads that share a line of 128 bytes: one, since unlike a warp's lanes they need a barrier
  /// (ThreadLineEnv).
  static constexpr int kLineTeam = 1;
  /// Threads that share a part of a phase's bytes.
  static constexpr int kWarp = 1;
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

 protected:
  ThreadTeam& team_;
  int thread_index_;
};

/// One thread of a block whose threads share lines as a warp's lanes do. Slow, since each vote is a
/// barrier: for checks of the code that a GPU runs. A block has a multiple of 8 threads.
class ThreadLineEnv : public ThreadEnv {
 public:
  static constexpr int kLineTeam = ThreadLine::kLanes;
  static constexpr int kSpins = 4;

  explicit ThreadLineEnv(const ThreadEnv& env) : ThreadEnv(env) {}

  bool all_of_line(bool value) const { return count(value) == kLineTeam; }
  bool any_of_line(bool value) const { return count(value) != 0; }
  /// The lanes' loads of one line as if by one instruction: a lane whose flag has arrived finds the
  /// other lanes' bytes, too.
  device::Word16 load_of_line(const void* from) const {
    device::Word16 words{};
    const auto* own = static_cast<const uint64_t*>(from);
    if (has_flag()) {
      words.high = device::load_acquire(own[1]);
      words.low = device::load_relaxed(own[0]);
    }
    (void)count(true);
    return has_flag() ? words : device::load_relaxed16(from);
  }
  /// The lanes' stores of one line as if by one instruction: the flag is not visible before the
  /// other lanes' bytes.
  void store_of_line(void* to, device::Word16 words) const {
    auto* own = static_cast<uint64_t*>(to);
    if (!has_flag()) device::store_relaxed16(to, words);
    (void)count(true);
    if (!has_flag()) return;
    device::store_relaxed(own[0], words.low);
    device::store_release(own[1], words.high);
  }

 private:
  int lane() const { return thread_index_ % kLineTeam; }
  /// The last lane has the last 16 bytes, which end with the flag.
  bool has_flag() const { return lane() == kLineTeam - 1; }
  int count(bool value) const { return team_.line(thread_index_).count(lane(), value); }
};

}  // namespace pycoll
