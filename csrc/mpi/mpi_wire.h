// Sends frames as MPI messages: one message for each frame, with header and payload.
//
// Frames are in the wire's own memory, so that MPI never holds memory that its owner may need back,
// and receives are posted before messages come. What is sent is copied into it; the sink swaps the
// memory of a long frame that has come for other memory (FrameSink::swap_memory). Sending from and
// receiving into the rings, with a second message for the payload, was measured to be slower: that
// message must wait until its receive is posted. Compiled once for each ABI.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "mpi/runtime.h"
#include "transport/net/wakeup.h"
#include "transport/net/wire.h"

namespace pycoll::PYCOLL_MPI_ABI {

class MpiWire final : public Wire {
 public:
  MpiWire(std::shared_ptr<Comm> comm, const std::vector<int>& peers);
  ~MpiWire() override;

  std::string_view name() const override { return "mpi"; }
  void send(int peer, const FrameHeader& header, const void* payload, Rest rest) override;
  bool poll(FrameSink& sink, int first) override;
  bool ends_waits() const override { return false; }
  void wait(int64_t ns) override;
  void pause(int64_t ns) override;
  void wake() override;
  bool has_unsent() const override { return num_sends_ != 0; }
  size_t num_unsent(int peer) const override {
    return links_[static_cast<size_t>(peer)]->num_sends;
  }
  void let_go(const std::byte*, const std::byte*) override {}
  void discard(int) override {}
  void close(int peer) override;
  void disown() override;

  // The caller of these two holds the runtime's lock.

  /// Tells all peers that this rank sends no more messages.
  void say_goodbye();
  /// Says goodbye, waits at most `patience_ns` for the peers' goodbyes, and cancels all receives.
  void end(int64_t patience_ns);

 private:
  static constexpr size_t kMessageBytes = sizeof(FrameMemory::frame);
  static constexpr size_t kNumPosted = 8;  // receives for each peer: 2 MiB
  static constexpr uint16_t kGoodbye = 1;  // FrameHeader::spare: nothing comes after it

  static constexpr size_t kSmallBytes = 4096;  // messages up to this size have such memory
  static constexpr size_t kMaxSpares = 64;     // large ones that are kept for reuse

  /// Memory of a message that is being sent: kSmallBytes or kMessageBytes.
  struct Outgoing {
    std::unique_ptr<std::byte[]> bytes;
    size_t capacity = 0;
  };
  struct Link {
    int peer = 0;
    bool open = true;
    int failed = -1;          // error that the next poll reports; -1: none
    size_t num_sends = 0;     // active requests
    size_t unsent_bytes = 0;  // their memory
    std::array<std::unique_ptr<FrameMemory>, kNumPosted> posted;
    std::array<MPI_Request, kNumPosted> requests;
    size_t populated_bytes = 0;  // of the payloads in `posted`
    size_t next = 0;             // index in `posted` of the next message
    size_t next_bytes = 0;       // its length once it has come; else 0
  };
  /// Purpose of a request of `requests_`: to receive a link's next message, or to send `sent`.
  struct Purpose {
    Link* link = nullptr;
    Outgoing sent = {};
  };

  Outgoing take_memory(size_t nbytes);
  void give_back(Outgoing message);
  bool is_over() const { return disowned_ || ended_ || shared_.over; }
  void add(MPI_Request request, Purpose purpose);
  void remove(size_t at);
  void post(Link& link, size_t at);
  void note_next(Link& link, const MPI_Status& status);
  bool complete();
  bool take(Link& link, FrameSink& sink);
  void fail(Link& link, FrameSink& sink, int error);
  void drop(Link& link);
  void leave_to_mpi();
  bool complete_sends();
  bool has_heard_goodbye(Link& link);

  std::shared_ptr<Comm> comm_;
  Shared& shared_;
  const MpiApi& api_;
  Wakeup wakeup_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null: none
  std::vector<Link*> present_;
  // Active requests, and the purpose of each.
  std::vector<MPI_Request> requests_;
  std::vector<Purpose> purposes_;
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;
  std::vector<Outgoing> spares_;
  size_t num_sends_ = 0;
  std::atomic<int> num_idle_{0};  // waits since the last progress
  bool said_goodbye_ = false;
  bool ended_ = false;
  bool disowned_ = false;
};

}  // namespace pycoll::PYCOLL_MPI_ABI
