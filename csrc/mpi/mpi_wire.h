// Frames as messages of MPI.
//
// A frame is one message, header and payload together, up to kMessageBytes; the payload of a larger
// one is a message of its own behind that, sent from where it lies and received into its place.
// Receives for first messages are posted before anything comes. Compiled once for each ABI.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "mpi/runtime.h"
#include "transport/kick.h"
#include "transport/wire.h"

namespace pycoll::PYCOLL_MPI_ABI {

class MpiWire final : public Wire {
 public:
  MpiWire(std::shared_ptr<Comm> comm, const std::vector<int>& peers);
  ~MpiWire() override;

  std::string_view name() const override { return "mpi"; }
  void send(int peer, const FrameHeader& header, const void* payload, bool keep) override;
  bool poll(FrameSink& sink, int first) override;
  void wait(int64_t ns) override;
  void pause(int64_t ns) override;
  void kick() override;
  bool has_unsent() const override { return num_sends_ != 0; }
  bool let_go(const std::byte* begin, const std::byte* end) override;
  void close(int peer) override;
  void disown() override;

  // With the runtime's lock.

  /// Tells all peers that nothing more comes.
  void say_goodbye();
  /// After that leaves no receive posted; waits for the peers' goodbyes, at most so long.
  void end(int64_t patience_ns);

 private:
  static constexpr size_t kMessageBytes = 8 << 10;
  static constexpr size_t kInlineBytes = kMessageBytes - sizeof(FrameHeader);
  static constexpr uint16_t kGoodbye = 1;   // FrameHeader::spare: nothing comes after it
  static constexpr size_t kNumPosted = 16;  // receives of first messages, for each peer

  struct Message {
    std::byte bytes[kMessageBytes];
  };
  /// A frame whose payload is on its way.
  struct Incoming {
    FrameHeader header;
    bool is_placed = false;  // it comes to its place; else into `own`
    bool is_here = false;
    std::unique_ptr<std::byte[]> own;
    uint64_t number = 0;  // tells apart those of a peer
  };
  struct Link {
    int peer = 0;
    bool open = true;
    int failed = -1;  // told at the next poll
    std::array<Message, kNumPosted> posted;
    std::array<MPI_Request, kNumPosted> requests;
    size_t next = 0;        // of `posted`: the message that comes next
    size_t next_bytes = 0;  // it is here: so long; else 0
    std::deque<Incoming> incoming;
    uint64_t num_incoming = 0;
    uint32_t num_payloads_out = 0;
    uint32_t num_payloads_in = 0;
  };
  enum class Kind : uint8_t { kFirst, kPayload, kSend };
  /// What a request of `requests_` is for.
  struct Purpose {
    Kind kind = Kind::kFirst;
    Link* link = nullptr;
    uint64_t number = 0;                         // kPayload
    std::unique_ptr<Message> message = nullptr;  // kSend: what is sent, where it is the wire's
    std::unique_ptr<std::byte[]> own = nullptr;  // kSend: the same
    const std::byte* payload = nullptr;  // kSend, kPayload: in memory that is not the wire's
    size_t nbytes = 0;
    int tag = 0;  // kPayload
  };

  bool is_over() const { return disowned_ || ended_ || shared_.over; }
  void add(MPI_Request request, Purpose purpose);
  void remove(size_t at);
  void post_first(Link& link, size_t at);
  bool complete();
  bool take(Link& link, FrameSink& sink);
  bool take_first(Link& link, FrameSink& sink);
  bool deliver(Link& link, const FrameHeader& header, const std::byte* from, FrameSink& sink);
  bool start_payload(Link& link, const FrameHeader& header, FrameSink& sink);
  void isend(Link& link, const void* data, size_t nbytes, int tag, Purpose purpose);
  void fail(Link& link, FrameSink& sink, int error);
  void drop(Link& link);
  void redirect(const Purpose& purpose, const MPI_Status& status);
  void leave_to_mpi();
  bool has_heard_goodbye(Link& link);
  std::unique_ptr<Message> take_message();

  std::shared_ptr<Comm> comm_;
  Shared& shared_;
  const MpiApi& api_;
  Kick kick_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null: none
  std::vector<Link*> present_;
  // Of the same length: what MPI is asked about.
  std::vector<MPI_Request> requests_;
  std::vector<Purpose> purposes_;
  std::vector<int> done_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::unique_ptr<Message>> spare_;
  size_t num_sends_ = 0;
  std::atomic<int> num_idle_{0};  // waits since something moved
  bool said_goodbye_ = false;
  bool ended_ = false;
  bool disowned_ = false;
};

}  // namespace pycoll::PYCOLL_MPI_ABI
