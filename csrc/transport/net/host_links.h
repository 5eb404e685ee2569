// This process's links to all ranks on other hosts, shared by the communicators of a session.
//
// Whoever waits for something moves frames on (poll). While nobody does, a thread does; it also
// says now and then that this rank is alive, and finds out who is not. One lock, so that one thread
// at a time is in the wire.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "transport/net/wire.h"

namespace pycoll {

class Proxy;

class HostLinks final : private FrameSink {
 public:
  /// What became of a rank.
  enum class Peer : uint8_t { kThere, kGone, kSilent };

  /// `peers`: the ranks of the world that the wire leads to. A rank that is silent for `silence_s`
  /// counts as lost. Without `background` no thread works while nobody waits; then nobody can
  /// say for how long a silence is good, and `silence_s` is 0.
  HostLinks(std::unique_ptr<Wire> wire, int num_ranks, const std::vector<int>& peers,
            double silence_s, bool background);
  ~HostLinks() override;

  /// Hold it around all that is below, as far as nothing else is said.
  std::recursive_mutex& mutex() { return mutex_; }
  std::string_view wire_name() const { return wire_->name(); }
  double silence_s() const { return silence_s_; }

  void add(Proxy& proxy);
  /// After it nothing touches the proxy, nor the memory [begin, end). What it has not sent yet goes
  /// on; waits for that, at most a while, when no other proxy is left.
  void remove(Proxy& proxy, const std::byte* begin, const std::byte* end);
  void send(int peer, const FrameHeader& header, const void* payload, bool keep);

  /// Moves frames on, unless another thread is at it: first those from `first` (-1: nobody). Any
  /// thread, without the lock.
  void poll(int first);
  /// Sleeps until there may be something to move, or `ready(context)`. Any thread, without the
  /// lock.
  void nap(int64_t ns, bool (*ready)(void*) = nullptr, void* context = nullptr);
  /// At the end of a call: what is left to send goes on without its thread. Without the lock.
  void flush_remaining();

  /// Any thread, without the lock.
  Peer state_of(int peer) const { return states_[static_cast<size_t>(peer)]; }

  /// In a forked process, whose parent has the links: nothing may lock any more, since a thread
  /// that is not here may have the lock.
  void disown();
  bool is_disowned() const { return disowned_; }

 private:
  bool place(int peer, const FrameHeader& header, PayloadParts* parts) override;
  void arrived(int peer, const FrameHeader& header) override;
  void lost(int peer, int error) override;
  void poll_for_all(int first);
  void run();
  void look_after(int64_t now);
  void flush(int64_t end_ns);

  std::unique_ptr<Wire> wire_;
  std::vector<int> peers_;
  double silence_s_;
  std::recursive_mutex mutex_;
  std::map<uint64_t, Proxy*> pumps_;               // by group
  std::map<uint64_t, std::set<int>> early_joins_;  // of groups that are not here yet
  std::vector<std::vector<std::byte>> staged_;     // by peer: payloads that need work
  std::vector<std::atomic<Peer>> states_;          // by rank
  std::vector<bool> heard_;                        // since the last look
  std::vector<bool> spoken_;
  std::vector<int64_t> heard_ns_;
  std::vector<int64_t> spoken_ns_;
  int64_t looked_ns_ = 0;
  std::atomic<uint64_t> num_polls_{0};
  std::atomic<int> num_naps_{0};
  std::atomic<bool> has_rest_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> disowned_{false};
  std::unique_ptr<std::thread> thread_;  // last: it uses the others
};

}  // namespace pycoll
