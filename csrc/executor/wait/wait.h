// The one way to wait: spin_until(condition), which also checks the abort word, the deadline and
// dead peers.
//
// The fast path spins. The slow path goes from spinning to yielding to naps on the rank's bell, and
// every few hundred microseconds checks for what could make the wait endless: a failure that
// another rank announced, a peer whose process ended, a peer that made a different call, Ctrl-C,
// and the deadline. When waiting ranks outnumber the cores they skip the spinning, because the
// awaited rank needs the core.
#pragma once

#include <functional>
#include <string>

#include "base/clock.h"
#include "executor/wait/wait_site.h"
#include "transport/transport.h"

namespace pycoll {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Callback for an operation's first slow wait, at most once: lets the caller release a lock that
/// it holds in the quick case (Python's GIL).
struct OnSlow {
  void (*function)(void*) = nullptr;
  void* context = nullptr;
  void operator()() const {
    if (function != nullptr) function(context);
  }
};

class Waiter {
 public:
  explicit Waiter(Transport& transport);

  /// Called once per operation. `digest` identifies this rank's own record of operation `sequence`.
  void begin(uint64_t sequence, uint32_t digest, double timeout_s, const OnSlow& on_slow) {
    sequence_ = sequence;
    digest_ = digest;
    timeout_s_ = timeout_s;
    on_slow_ = on_slow;
    slow_ = false;
  }
  uint32_t digest() const { return digest_; }
  uint64_t sequence() const { return sequence_; }
  int rank() const { return rank_; }
  /// Records that the operation of begin() waited, and failed, on a device.
  void waited_elsewhere(const WaitSite& site) {
    slow_ = true;
    site_ = site;
  }
  /// False when the communicator broke before this call. What was read from other ranks' buffers
  /// until then is not to be used.
  bool is_whole() {
    fence_behind_reads();
    if (load_acquire(segment_.failure_word()) == 0) [[likely]]
      return true;
    slow_ = false;  // the failure was not found by a wait of this rank
    return false;
  }
  /// Lets the caller of a blocking call release what it holds, before a wait outside spin_until().
  void let_go() {
    on_slow_();
    on_slow_ = {};
  }
  /// Wakes the waiting ranks of this process.
  void wake_others() const { segment_.ring_all_bells(); }

  /// Returns true once `ready()` is true; false when it never will be: then raise_failure() throws
  /// the reason.
  template <class Ready>
  bool spin_until(Ready&& ready, const WaitSite& site) {
    for (int i = 0; i < num_spins_; ++i) {
      if (ready()) return true;
      cpu_pause();
    }
    using Callable = std::remove_reference_t<Ready>;
    return wait_slowly([](void* f) { return (*static_cast<Callable*>(f))(); },
                       const_cast<void*>(static_cast<const void*>(&ready)), site);
  }

  /// Reports that a message from `peer` carried the mark of another call. Returns false.
  bool mismatch(int peer);
  /// Reports that bytes from `peer` have another checksum than it gave them. Returns false.
  bool corrupted(int peer);
  /// False when a rank that has entered this operation made a different call. If two ranks publish
  /// different calls and then check, at least one of them gets false.
  bool peers_agree();

  /// Raises the typed error for the failure that broke the communicator. `what` begins the
  /// message: `all_reduce #412`. `call` adds details of this rank's call where that helps.
  [[noreturn]] void raise_failure(const std::string& what, const std::string& call = "") const;
  /// Raises the failure for the operation of `record`, called by this rank.
  [[noreturn]] void raise_failure(const CallRecord& record) const;

  /// Called about every 20 ms of a slow wait; ends the wait by returning true (Ctrl-C).
  std::function<bool()> interrupted;

 private:
  bool wait_slowly(bool (*ready)(void*), void* context, const WaitSite& site);
  bool wait_in_view(bool (*ready)(void*), void* context, const WaitSite& site);
  bool look_for_trouble(bool (*ready)(void*), void* context, const WaitSite& site);
  /// Looks at some ranks, in turn; at the deadline at all of them. True if one of them, which the
  /// operation needs, has ended: `failure` describes it.
  bool find_death(bool at_all, Failure& failure);
  void yield(int64_t now);
  void nap(bool (*ready)(void*), void* context, int peer);
  bool spin_with_hosts(bool (*ready)(void*), void* context, int peer);
  void ask_hosts(const WaitSite& site);
  std::string describe_end(int rank, int signal) const;
  /// The rank that `peer` is waiting for (follows the chain of waits).
  int find_culprit(int peer) const;
  std::string describe_missing(int culprit) const;
  std::string describe_mismatch(const Failure& failure) const;

  Transport& transport_;
  Segment& segment_;
  Proxy* proxy_;  // null: all ranks are on this host
  int rank_;
  int max_spins_;
  int num_spins_;  // adapts to whether this rank has a core to itself
  int64_t yield_ns_;
  int64_t remote_yield_ns_;  // for a rank of another host
  uint64_t sequence_ = 0;
  uint32_t digest_ = 0;
  double timeout_s_ = 0;
  OnSlow on_slow_;
  bool slow_ = false;                         // this operation had a slow wait
  Deadline deadline_ = Deadline::after_s(0);  // of this operation; valid once it is slow
  unsigned num_looks_ = 0;
  int next_watched_ = 0;       // by find_death()
  int64_t next_early_ns_ = 0;  // the next early look at the awaited rank
  int64_t left_ns_ = 0;   // when this operation's wait first found that the awaited rank had left
  int64_t asked_ns_ = 0;  // when remote ranks were last asked for their status
  int64_t credit_asked_ns_ = 0;
  WaitSite site_;  // the wait of this rank that failed
};

}  // namespace pycoll
