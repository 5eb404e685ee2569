// The proxy: what makes a ring in this host's memory a link to a rank of another host.
//
// Every host has the rings of all ranks. A rank writes its message for a remote rank into a ring as
// for any other; its proxy sends the slot, and the proxy of the receiver puts it into that rank's
// ring there. What a reader releases goes back as a credit, with the next frame. So whoever reads
// and writes rings needs not know where the other end runs. Mailboxes alike, and the states and
// records of remote ranks are mirrored when somebody needs them (transport/proxy/state_snapshot.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/net/host_links.h"
#include "transport/ring/segment.h"

namespace pycoll {

class Proxy {
 public:
  static constexpr size_t kMaxPayloadBytes = size_t{1} << 20;

  /// `members`: the ranks of this communicator as ranks of the world; `remote`: those that run on
  /// another host. `group` is the same for all members, and another one for every
  /// communicator.
  Proxy(std::shared_ptr<HostLinks> host_links, Segment& segment, int rank, std::vector<int> members,
        const RankSet& remote, uint64_t group);
  ~Proxy();
  Proxy(const Proxy&) = delete;

  uint64_t group() const { return group_; }
  bool is_remote(int rank) const { return rank >= 0 && remote_[static_cast<size_t>(rank)]; }
  /// Remote members that have not said that they are there; and says so for this rank.
  void say_joined();
  std::vector<int> missing() const;

  // For the thread that runs an operation. All may be called while the proxy's thread works.

  /// A message of `nbytes` was posted for `peer`, in the call with this number.
  void on_post(ProtocolKind protocol, int peer, int64_t nbytes, uint32_t mark, uint64_t call);
  /// A message of `peer` was read.
  void released(ProtocolKind protocol, int peer);
  /// Something of this rank changed that `peer` may wait for: messages, its end, a failure.
  void ring(int peer);
  /// Moves frames on, of all communicators; from `peer` first.
  void poll(int peer) {
    host_links_->poll(is_remote(peer) ? members_[static_cast<size_t>(peer)] : -1);
  }
  void nap(int64_t ns, bool (*ready)(void*) = nullptr, void* context = nullptr) {
    host_links_->nap(ns, ready, context);
  }
  /// This call ends.
  void flush_remaining() { host_links_->flush_remaining(); }
  /// Asks `peer` (-1: all) what it is doing in that operation, and says what this rank does.
  void request_status(int peer, uint64_t sequence);
  /// The same, and waits for what it says. False when nothing came in `timeout_s`.
  bool fetch_record(int peer, uint64_t sequence, double timeout_s);
  HostLinks::Peer state_of(int peer) const {
    return host_links_->state_of(members_[static_cast<size_t>(peer)]);
  }
  /// `peer`, of another host, has left: behind all that it sent here. (Its state in the segment
  /// says so as soon as one rank of this host has heard it.)
  bool has_left(int peer) const { return load_acquire(link(peer).peer_left) != 0; }
  /// Lets go of the memory.
  void close();

  // For HostLinks, which has the lock. Peers are ranks of the world.

  void joined(int world_peer);
  bool place(int world_peer, const FrameHeader& header, std::vector<std::byte>& staged,
             PayloadParts* parts);
  void arrived(int world_peer, const FrameHeader& header, std::vector<std::byte>& staged);

 private:
  struct Link {
    RingMemory out[kNumSlotProtocols];
    RingMemory in[kNumSlotProtocols];
    uint64_t posted[kNumSlotProtocols] = {};
    uint64_t received[kNumSlotProtocols] = {};
    uint64_t told[kNumSlotProtocols] = {};  // of what was released
    MailboxMemory mail_out;
    MailboxMemory mail_in;
    uint64_t shipped = 0;   // lines
    uint64_t unloaded = 0;  // lines
    uint64_t told_head = 0;
    uint64_t told_delivered = 0;
    bool joined = false;
    bool left = false;       // this rank, and the peer knows
    uint64_t peer_left = 0;  // the peer, and this rank knows
  };

  Link& link(int peer) { return links_[static_cast<size_t>(peer)]; }
  const Link& link(int peer) const { return links_[static_cast<size_t>(peer)]; }
  int rank_of(int world_peer) const { return ranks_[static_cast<size_t>(world_peer)]; }
  void send(int peer, FrameHeader header, const void* payload, bool keep);
  void send_bytes(int peer, FrameKind kind, const std::string& bytes);
  void ship_messages(int peer);
  void tell_mail(int peer);
  void tell_failure();
  std::string own_state(uint64_t sequence) const;

  bool take_heads(int peer, const FrameHeader& header);
  bool place_slot(int peer, const FrameHeader& header, std::vector<std::byte>& staged,
                  PayloadParts* parts);
  bool place_lines(int peer, const FrameHeader& header, std::vector<std::byte>& staged,
                   PayloadParts* parts);
  void unload_slot(int peer, const FrameHeader& header, const std::vector<std::byte>& staged);
  void unload_lines(int peer, const std::vector<std::byte>& staged);
  void hear_state(int peer, const FrameHeader& header, const std::vector<std::byte>& staged);
  void hear_failure(const FrameHeader& header, const std::vector<std::byte>& staged);
  void compare(int peer, const CallRecord& record);

  std::shared_ptr<HostLinks> host_links_;
  Segment& segment_;
  const int rank_;
  const std::vector<int> members_;  // ranks of the world
  std::vector<int> ranks_;          // of the world's ranks: members here, or -1
  const RankSet remote_;
  const uint64_t group_;
  std::vector<Link> links_;  // by rank
  std::vector<std::byte> packed_;
  bool failure_told_ = false;
  bool closed_ = false;
};

}  // namespace pycoll
