// Frames over TCP: one channel for each remote rank, non-blocking, vectored input and output.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "base/fd.h"
#include "bootstrap/security/channel.h"
#include "transport/net/wakeup.h"
#include "transport/net/wire.h"

namespace pycoll {

class TcpWire final : public Wire {
 public:
  /// `channels`: by rank of the world; empty for ranks of this host.
  explicit TcpWire(std::vector<Channel> channels);
  ~TcpWire() override;

  std::string_view name() const override { return "tcp"; }
  void send(int peer, const FrameHeader& header, const void* payload, Rest rest) override;
  bool poll(FrameSink& sink, int first) override;
  bool has_stopped() const override { return has_stopped_; }
  void wait(int64_t ns) override;
  void pause(int64_t ns) override;
  void wake() override;
  bool has_unsent() const override { return num_unsent_ != 0; }
  size_t num_unsent(int peer) const override;
  bool has_delivered() const override;
  void let_go(const std::byte* begin, const std::byte* end) override;
  void discard(int peer) override;
  void close(int peer) override;
  void disown() override;

 private:
  struct Unsent {
    FrameHeader header;
    const std::byte* payload;
    std::unique_ptr<std::byte[]> own;  // set if the payload is a copy
    size_t sent;                       // bytes sent so far of header and payload
    size_t size() const { return sizeof(header) + header.nbytes; }
    size_t memory() const { return sizeof(Unsent) + (own != nullptr ? header.nbytes : 0); }
  };
  struct Link;

  void keep(Link& link, Unsent& frame, std::byte* memory);
  bool flush(Link& link);
  bool read(Link& link, FrameSink& sink);
  bool take(Link& link, size_t nbytes, size_t direct_bytes, FrameSink& sink);
  void want_output(Link& link, bool wanted);
  bool serve(FrameSink& sink, int first);
  /// Ends a link whose peer has sent an invalid frame. True: something has happened.
  bool refuse(Link& link, FrameSink& sink);
  void fail(Link& link, FrameSink& sink, int error);

  Fd epoll_;
  Wakeup wakeup_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null: none
  std::vector<Link*> present_;
  size_t num_unsent_ = 0;  // frames
  bool encrypted_ = false;
  // Bytes may be buffered that epoll does not show: no thread sleeps before the next poll().
  std::atomic<bool> may_have_more_{false};
  std::atomic<bool> has_stopped_{false};
  bool has_full_link_ = false;  // its peer reads nothing, so epoll does not show it
};

}  // namespace pycoll
