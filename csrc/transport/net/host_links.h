// This process's links to all ranks on other hosts, shared by the communicators of a session.
//
// A waiting thread moves frames itself (poll). While no thread waits, a background thread does; it
// also sends heartbeats and detects lost peers. One lock guards the wire.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/thread.h"
#include "transport/net/wire.h"

namespace pycoll {

class Proxy;

class HostLinks final : private FrameSink {
 public:
  /// State of a rank. kRejected: it has sent an invalid frame, so its link has been closed and its
  /// communicators are broken. kFull: it has left kMaxUnsentBytes unread, so its link has been
  /// closed.
  enum class Peer : uint8_t { kThere, kGone, kSilent, kRejected, kFull };

  /// `peers`: the ranks of the world at the other ends of the wire. A rank that is silent for
  /// `silence_s` counts as lost. Without `background`, no frames move while no thread waits:
  /// silence then means nothing, so `silence_s` must be 0.
  HostLinks(std::unique_ptr<Wire> wire, int num_ranks, const std::vector<int>& peers,
            double silence_s, bool background);
  ~HostLinks() override;

  /// Hold it while calling the functions below, unless their comments say otherwise.
  std::recursive_mutex& mutex() { return mutex_; }
  std::string_view wire_name() const { return wire_->name(); }
  bool ends_naps() const { return wire_->ends_waits(); }
  double silence_s() const { return silence_s_; }

  void add(Proxy& proxy);
  /// Detaches the proxy: afterwards nothing uses it or the memory [begin, end). Its unsent frames
  /// are still sent; the last proxy waits for that, for at most kLingerNs.
  void remove(Proxy& proxy, const std::byte* begin, const std::byte* end);
  void send(int peer, const FrameHeader& header, const void* payload, Rest rest);
  /// Writes no more of the payload that is being received from this rank.
  void discard_rest(int peer) { wire_->discard(peer); }
  /// Closes the link to a rank that has sent something invalid.
  void reject(int peer);

  /// Moves frames, unless another thread does: first those from `first` (-1: no preference). Any
  /// thread, without the lock.
  void poll(int first);
  /// Sleeps until frames may move or `ns` have passed; returns at once if `ready(context)`. Any
  /// thread, without the lock.
  void nap(int64_t ns, bool (*ready)(void*) = nullptr, void* context = nullptr);
  /// At the end of a call: leaves the unsent frames to the background thread. Without the lock.
  void flush_remaining();

  /// A collective of this rank runs. It moves frames itself, so the background thread, which would
  /// take a core from it, pauses for longer.
  class RunningCall {
   public:
    explicit RunningCall(HostLinks& links) : links_(links) { ++links_.num_running_; }
    ~RunningCall() { links_.end_call(); }
    RunningCall(const RunningCall&) = delete;

   private:
    HostLinks& links_;
  };

  /// Any thread, without the lock.
  Peer state_of(int peer) const { return states_[static_cast<size_t>(peer)]; }

  /// Gives up the links in a forked process: the parent owns them. Nothing may lock any more, since
  /// a thread of the parent may have held the lock.
  void disown();
  bool is_disowned() const { return disowned_; }

 private:
  bool place(int peer, const FrameHeader& header, PayloadParts* parts) override;
  bool swap_memory(int peer, const FrameHeader& header,
                   std::unique_ptr<FrameMemory>& memory) override;
  bool arrived(int peer, const FrameHeader& header) override;
  bool has_reader() const override { return num_running_ != 0; }
  void lost(int peer, int error) override;
  bool add_early_join(int peer, uint64_t group);
  void end(int peer, Peer state);
  void poll_for_all(int first);
  void run();
  void end_call();
  int64_t next_pause_ns(int64_t last_ns);
  void revoke(std::string_view reason);
  void look_after(int64_t now);
  void flush(int64_t end_ns);

  std::unique_ptr<Wire> wire_;
  std::vector<int> peers_;
  double silence_s_;
  std::recursive_mutex mutex_;
  std::map<uint64_t, Proxy*> proxies_;             // by group
  std::map<uint64_t, std::set<int>> early_joins_;  // of groups that this rank has not added yet
  std::vector<int> num_early_joins_;               // by peer
  std::vector<Proxy*> placed_;  // by peer: the proxy of the frame being received, or null
  std::vector<std::vector<std::byte>> staged_;  // by peer: payloads to process on arrival
  std::vector<std::atomic<Peer>> states_;       // by rank
  std::vector<bool> heard_;                     // by rank: since the last look_after()
  std::vector<bool> spoken_;
  std::vector<int64_t> heard_ns_;
  std::vector<int64_t> spoken_ns_;
  int64_t looked_ns_ = 0;
  std::atomic<uint64_t> num_polls_{0};
  std::atomic<int> num_naps_{0};
  std::atomic<bool> has_rest_{false};
  std::atomic<int> num_running_{0};          // collectives
  std::atomic<uint64_t> num_ended_{0};       // collectives
  std::atomic<bool> has_long_pause_{false};  // the end of a collective ends it
  uint64_t num_ended_before_ = 0;            // at the background thread's last pause
  std::atomic<bool> stop_{false};
  std::atomic<bool> disowned_{false};
  std::unique_ptr<std::thread> thread_;  // last: it uses the members above
};

}  // namespace pycoll
