// The proxy: turns a ring in this host's memory into a link to a rank of another host.
//
// Every host has the rings of all ranks. A rank writes its message for a remote rank into a ring as
// for a local one; its proxy sends the slot, and the receiver's proxy puts it into the same ring on
// the other host. Slots that a reader releases return as credits, with the next frame. So readers
// and writers of rings need not know where the other end runs. Mailboxes work in the same way, and
// the states and records of remote ranks are mirrored on request
// (transport/proxy/state_snapshot.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "transport/net/host_links.h"
#include "transport/ring/segment.h"

namespace pycoll {

class Proxy {
 public:
  /// `members`: the ranks of this communicator as ranks of the world; `remote`: the members that
  /// run on other hosts. `group` is equal on all members, and different for every communicator.
  Proxy(std::shared_ptr<HostLinks> host_links, Segment& segment, int rank, std::vector<int> members,
        const RankSet& remote, uint64_t group);
  ~Proxy();
  Proxy(const Proxy&) = delete;

  uint64_t group() const { return group_; }
  HostLinks& host_links() { return *host_links_; }
  bool is_remote(int rank) const { return rank >= 0 && remote_[static_cast<size_t>(rank)]; }
  /// Tells the remote members that this rank has joined.
  void say_joined();
  /// Remote members that have not joined yet.
  std::vector<int> missing() const;

  // For the thread that runs an operation; may be called while the background thread works.

  /// A message of `nbytes` was posted for `peer`, in the call with this number. `payload`: where
  /// its bytes are, if its slot has not been filled; they may change when this returns.
  void on_post(ProtocolKind protocol, int peer, int64_t nbytes, uint32_t mark, uint64_t call,
               const std::byte* payload = nullptr);
  /// A message of `peer` was read.
  void released(ProtocolKind protocol, int peer);
  /// Sends `peer` what it may wait for: this rank's messages, its end, a failure.
  void ring(int peer);
  /// Moves the frames of all communicators, first those from `peer`.
  void poll(int peer) {
    host_links_->poll(is_remote(peer) ? members_[static_cast<size_t>(peer)] : -1);
  }
  /// Whether nap() ends when frames may move, rather than after a time alone.
  bool ends_naps() const { return host_links_->ends_naps(); }
  void nap(int64_t ns, bool (*ready)(void*) = nullptr, void* context = nullptr) {
    host_links_->nap(ns, ready, context);
  }
  /// A place for one long message of `peer`, where this rank only copies it to.
  struct Expected {
    std::byte* memory = nullptr;  // null: none
    size_t nbytes = 0;
    uint64_t sequence = 0;  // RecvEnd::sequence
    uint32_t mark = 0;      // of the call
  };
  /// If that message begins to arrive from now on, it is received there, and is not in its slot.
  void expect(int peer, const Expected& expected);
  /// Nothing is written there any more. If only a part has arrived, the rest is discarded: the
  /// communicator has to be broken.
  void expect_no_more(int peer);
  /// Where messages of `peer` are that are not in their slots (RingMemory::elsewhere).
  const std::byte* const* elsewhere(ProtocolKind protocol, int peer) const {
    return protocol == ProtocolKind::kSimple && is_remote(peer) ? link(peer).elsewhere : nullptr;
  }
  /// At the end of a call: leaves its unsent frames to the background thread.
  void flush_remaining() { host_links_->flush_remaining(); }
  /// Asks `peer` (-1: all) for its state in that operation, and sends this rank's.
  void request_status(int peer, uint64_t sequence);
  /// As request_status(), and waits for the answer. False if none arrives within `timeout_s`.
  bool fetch_record(int peer, uint64_t sequence, double timeout_s);
  HostLinks::Peer state_of(int peer) const {
    return host_links_->state_of(members_[static_cast<size_t>(peer)]);
  }
  /// Whether `peer`, of another host, has left and everything it sent has arrived. (Its state in
  /// the segment changes earlier: once any rank of this host has received the news.)
  bool has_left(int peer) const { return load_acquire(link(peer).peer_left) != 0; }
  /// Closes the link to `peer`, which has sent an invalid message.
  void reject(int peer);
  /// Breaks the communicator for a reason of this rank, and tells the remote members.
  void revoke(std::string_view reason);
  /// As revoke(), for a failure.
  void fail(const Failure& failure);
  /// Stops using the memory.
  void close();

  // For HostLinks, which holds the lock. Peers are ranks of the world. The header of a frame has
  // passed is_valid(); these functions compare it with the state of the peer's link.

  void joined(int world_peer);
  /// False if the frame is invalid. Sets the parts, and writes none of their bytes.
  bool place(int world_peer, const FrameHeader& header, std::vector<std::byte>& staged,
             PayloadParts* parts);
  /// Call after place() of the same frame, as FrameSink::swap_memory().
  bool swap_memory(int world_peer, const FrameHeader& header, std::unique_ptr<FrameMemory>& memory);
  /// Call after place() of the same frame. False if the payload is invalid.
  bool arrived(int world_peer, const FrameHeader& header, std::vector<std::byte>& staged);
  /// Breaks the communicator, if the rank whose link has been closed is a member.
  void rejected(int world_peer);

 private:
  struct Link {
    RingMemory out[kNumSlotProtocols];
    RingMemory in[kNumSlotProtocols];
    uint64_t posted[kNumSlotProtocols] = {};
    uint64_t received[kNumSlotProtocols] = {};
    uint64_t told[kNumSlotProtocols] = {};  // released messages that the peer knows of
    // Messages that had been posted when the peer was last told in a frame of its own.
    uint64_t posted_then[kNumSlotProtocols] = {};
    // Memory of long messages of in[kSimple], by slot; null: none.
    std::unique_ptr<FrameMemory> long_messages[kMaxSlots];
    const std::byte* elsewhere[kMaxSlots] = {};
    Expected expected;
    bool in_expected = false;  // the frame being received goes to its memory
    MailboxMemory mail_out;
    MailboxMemory mail_in;
    uint64_t shipped = 0;              // lines
    uint64_t shipped_eager_bytes = 0;  // as MailboxWriter counts them
    uint64_t unloaded = 0;             // lines
    uint64_t told_head = 0;
    uint64_t told_delivered = 0;
    bool joined = false;
    bool left = false;       // this rank has left and told the peer
    uint64_t peer_left = 0;  // the peer has left and told this rank
  };

  Link& link(int peer) { return links_[static_cast<size_t>(peer)]; }
  const Link& link(int peer) const { return links_[static_cast<size_t>(peer)]; }
  /// The member of another host with this rank of the world; -1: there is none.
  int remote_member(int world_peer) const {
    const auto at = static_cast<size_t>(world_peer);
    return at < ranks_.size() && is_remote(ranks_[at]) ? ranks_[at] : -1;
  }
  void send(int peer, FrameHeader header, const void* payload, Rest rest);
  void send_bytes(int peer, FrameKind kind, const std::string& bytes);
  void ship_messages(int peer);
  void tell_mail(int peer);
  void tell_failure();
  std::string own_state(uint64_t sequence) const;

  bool has_valid_heads(int peer, const FrameHeader& header) const;
  bool has_valid_mail(int peer, const FrameHeader& header) const;
  void take_heads(int peer, const FrameHeader& header);
  static bool is_expected(const Expected& expected, const FrameHeader& header);
  static std::byte* place_long(Link& from, uint64_t index, uint64_t head);
  bool place_slot(int peer, const FrameHeader& header, std::vector<std::byte>& staged,
                  PayloadParts* parts);
  static bool has_room_for_lines(const Link& from, uint64_t num_lines);
  bool place_lines(int peer, const FrameHeader& header, std::vector<std::byte>& staged,
                   PayloadParts* parts);
  void unload_slot(int peer, const FrameHeader& header, const std::vector<std::byte>& staged);
  bool unload_lines(int peer, const FrameHeader& header, const std::vector<std::byte>& staged);
  bool hear_state(int peer, const FrameHeader& header, const std::vector<std::byte>& staged);
  bool hear_failure(const FrameHeader& header, const std::vector<std::byte>& staged);
  void compare(int peer, const CallRecord& record);

  std::shared_ptr<HostLinks> host_links_;
  Segment& segment_;
  const int rank_;
  const std::vector<int> members_;  // ranks of the world
  std::vector<int> ranks_;          // by rank of the world: rank here, or -1
  const RankSet remote_;
  const uint64_t group_;
  std::vector<Link> links_;  // by rank
  std::vector<std::byte> packed_;
  bool failure_told_ = false;
  bool closed_ = false;
};

}  // namespace pycoll
