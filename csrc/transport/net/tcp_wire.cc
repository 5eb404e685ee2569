#include "transport/net/tcp_wire.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace pycoll {
namespace {

// Buffer for headers and small frames, which are read together with the end of a payload. It is
// small because the part of a large payload that falls into it is copied once more.
constexpr size_t kInputBytes = 4096;
constexpr int kMaxReads = 16;  // from one peer in one poll, so that no peer starves
constexpr int kMaxFramesPerSend = 16;
constexpr uint32_t kWakeEvent = UINT32_MAX;

}  // namespace

struct TcpWire::Link {
  int peer = 0;
  Channel channel;
  bool wants_output = false;
  int failed = -1;  // errno of a failed send, reported at the next poll
  std::deque<Unsent> unsent;
  size_t unsent_memory = 0;  // of `unsent`
  // The frame being received: its header, and the missing part of its payload.
  bool in_payload = false;
  FrameHeader header;
  PayloadParts parts;
  size_t to_skip = 0;     // bytes left of a payload to discard
  bool has_rest = false;  // `input` has a header
  size_t input_bytes = 0;
  std::byte input[kInputBytes];
};

TcpWire::TcpWire(std::vector<Channel> channels) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw_system_error("epoll for links to other hosts");
  links_.resize(channels.size());
  for (size_t peer = 0; peer < channels.size(); ++peer) {
    if (!channels[peer]) continue;
    links_[peer] = std::make_unique<Link>();
    Link& link = *links_[peer];
    link.peer = static_cast<int>(peer);
    link.channel = std::move(channels[peer]);
    present_.push_back(&link);
    encrypted_ = encrypted_ || link.channel.is_encrypted();
    epoll_event event = {.events = EPOLLIN, .data = {.u32 = static_cast<uint32_t>(peer)}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link.channel.fd(), &event) != 0) {
      throw_system_error("epoll_ctl");
    }
  }
  epoll_event event = {.events = EPOLLIN, .data = {.u32 = kWakeEvent}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wakeup_.fd(), &event) != 0) {
    throw_system_error("epoll_ctl");
  }
  may_have_more_ = encrypted_;  // TLS may have read bytes beyond the handshake
}

TcpWire::~TcpWire() = default;

void TcpWire::send(int peer, const FrameHeader& header, const void* payload, Rest rest) {
  Link& link = *links_[static_cast<size_t>(peer)];
  if (!link.channel || link.failed >= 0) return;
  Unsent frame{header, static_cast<const std::byte*>(payload), nullptr, 0};
  if (link.unsent.empty()) {
    iovec parts[2] = {{&frame.header, sizeof(header)},
                      {const_cast<std::byte*>(frame.payload), header.nbytes}};
    const ssize_t sent = link.channel.send(parts, header.nbytes == 0 ? 1 : 2);
    if (sent >= 0) {
      frame.sent = static_cast<size_t>(sent);
    } else if (errno != EAGAIN && errno != EINTR) {
      link.failed = errno;
      return;
    }
    if (frame.sent == frame.size()) return;
  }
  const bool owns = rest.is_copied && rest.memory == nullptr;
  if (link.unsent_memory + sizeof(frame) + (owns ? header.nbytes : 0) > kMaxUnsentBytes) {
    link.failed = EDQUOT;
    has_full_link_ = true;
    return;
  }
  link.unsent_memory += sizeof(frame);
  if (rest.is_copied && header.nbytes != 0) keep(link, frame, rest.memory);
  link.unsent.push_back(std::move(frame));
  ++num_unsent_;
  want_output(link, true);
}

/// Copies the unsent part of the payload; `memory` null: to memory of the wire.
void TcpWire::keep(Link& link, Unsent& frame, std::byte* memory) {
  if (memory == nullptr) {
    frame.own.reset(new std::byte[frame.header.nbytes]);
    memory = frame.own.get();
    link.unsent_memory += frame.header.nbytes;
  }
  const size_t at = std::max(frame.sent, sizeof(FrameHeader)) - sizeof(FrameHeader);
  std::memcpy(memory + at, frame.payload + at, frame.header.nbytes - at);
  frame.payload = memory;
}

size_t TcpWire::num_unsent(int peer) const {
  return links_[static_cast<size_t>(peer)]->unsent.size();
}

void TcpWire::want_output(Link& link, bool wanted) {
  if (link.wants_output == wanted) return;
  link.wants_output = wanted;
  epoll_event event = {.events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN + 0u,
                       .data = {.u32 = static_cast<uint32_t>(link.peer)}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.channel.fd(), &event);
}

bool TcpWire::flush(Link& link) {
  bool moved = false;
  while (!link.unsent.empty()) {
    iovec parts[2 * kMaxFramesPerSend];
    size_t num_parts = 0;
    size_t wanted = 0;
    for (size_t i = 0; i < link.unsent.size() && i < kMaxFramesPerSend; ++i) {
      Unsent& frame = link.unsent[i];
      size_t done = frame.sent;
      if (done < sizeof(FrameHeader)) {
        parts[num_parts++] = {reinterpret_cast<std::byte*>(&frame.header) + done,
                              sizeof(FrameHeader) - done};
        done = sizeof(FrameHeader);
      }
      const size_t at = done - sizeof(FrameHeader);
      if (at < frame.header.nbytes) {
        parts[num_parts++] = {const_cast<std::byte*>(frame.payload) + at, frame.header.nbytes - at};
      }
      wanted += frame.size() - frame.sent;
    }
    const ssize_t sent = link.channel.send(parts, num_parts);
    if (sent < 0) {
      if (errno != EAGAIN && errno != EINTR) link.failed = errno;
      return moved;
    }
    moved = moved || sent > 0;
    const bool all = static_cast<size_t>(sent) == wanted;
    for (auto left = static_cast<size_t>(sent); left != 0;) {
      Unsent& frame = link.unsent.front();
      const size_t now = std::min(left, frame.size() - frame.sent);
      frame.sent += now;
      left -= now;
      if (frame.sent != frame.size()) break;
      link.unsent_memory -= frame.memory();
      link.unsent.pop_front();
      --num_unsent_;
    }
    if (!all) return moved;
  }
  want_output(link, false);
  return moved;
}

bool TcpWire::poll(FrameSink& sink, int first) {
  const bool moved = serve(sink, first);
  if (encrypted_ || has_stopped_) {
    bool more = false;
    bool rest = false;
    for (const Link* link : present_) {
      more = more || (link->channel && link->channel.may_have_more());
      rest = rest || link->has_rest;
    }
    may_have_more_ = more || rest;
    has_stopped_ = rest;
  }
  return moved;
}

bool TcpWire::serve(FrameSink& sink, int first) {
  bool moved = false;
  const auto serve = [&](Link& link) {
    if (!link.channel) return;
    if (!link.unsent.empty() && link.failed < 0) moved = flush(link) || moved;
    const bool came = read(link, sink);
    moved = moved || came;
    // Frames that arrived before the connection broke are still valid.
    if (link.channel && link.failed >= 0 && !came) fail(link, sink, link.failed);
  };
  if (first >= 0 && links_[static_cast<size_t>(first)] != nullptr) {
    serve(*links_[static_cast<size_t>(first)]);
    if (moved && num_unsent_ == 0) return true;
  }
  if (present_.size() <= 2 || may_have_more_ || has_full_link_) {
    // Polling every link costs no more than epoll here, or finds what epoll does not show.
    for (Link* link : present_) {
      if (link->peer != first) serve(*link);
    }
    has_full_link_ = std::any_of(present_.begin(), present_.end(), [](const Link* link) {
      return link->channel && link->failed == EDQUOT;
    });
    return moved;
  }
  epoll_event events[64];
  const int num_events = ::epoll_wait(epoll_.get(), events, std::size(events), 0);
  for (int i = 0; i < num_events; ++i) {
    if (events[i].data.u32 != kWakeEvent) serve(*links_[events[i].data.u32]);
  }
  return moved;
}

bool TcpWire::read(Link& link, FrameSink& sink) {
  bool moved = link.has_rest;
  if (link.has_rest && !take(link, 0, 0, sink)) return refuse(link, sink);
  for (int i = 0; i < kMaxReads && link.channel && !link.has_rest; ++i) {
    iovec parts[3];
    size_t num_parts = 0;
    size_t direct_bytes = 0;
    if (link.in_payload && link.to_skip == 0) {
      for (int part = 0; part < link.parts.num_parts; ++part) {
        if (link.parts.nbytes[part] == 0) continue;
        parts[num_parts++] = {link.parts.data[part], link.parts.nbytes[part]};
        direct_bytes += link.parts.nbytes[part];
      }
    }
    const size_t room = kInputBytes - link.input_bytes;
    parts[num_parts++] = {link.input + link.input_bytes, room};
    const ssize_t got = link.channel.receive(parts, num_parts);
    if (got <= 0) {
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return moved;
      fail(link, sink, got == 0 ? 0 : errno);
      return true;
    }
    moved = true;
    if (!take(link, static_cast<size_t>(got), direct_bytes, sink)) return refuse(link, sink);
    if (static_cast<size_t>(got) < direct_bytes + room) return true;
  }
  return moved;
}

/// Processes `nbytes` that were read; up to `direct_bytes` of them are payload, already in place.
/// Stops after a long payload, so that its reader can say where the next one goes. False if the
/// sink refuses a frame.
bool TcpWire::take(Link& link, size_t nbytes, size_t direct_bytes, FrameSink& sink) {
  link.has_rest = false;
  size_t direct = std::min(nbytes, direct_bytes);
  link.input_bytes += nbytes - direct;
  const auto advance = [&link](size_t count) {
    for (int part = 0; part < link.parts.num_parts; ++part) {
      const size_t now = std::min(count, link.parts.nbytes[part]);
      link.parts.data[part] += now;
      link.parts.nbytes[part] -= now;
      count -= now;
    }
  };
  advance(direct);
  size_t at = 0;  // offset into the input
  for (;;) {
    if (link.in_payload) {
      const size_t skipped = std::min(link.to_skip, link.input_bytes - at);
      link.to_skip -= skipped;
      at += skipped;
      size_t missing = link.to_skip;
      for (int part = 0; part < link.parts.num_parts; ++part) {
        const size_t now = std::min(link.parts.nbytes[part], link.input_bytes - at);
        if (now != 0) std::memcpy(link.parts.data[part], link.input + at, now);
        link.parts.data[part] += now;
        link.parts.nbytes[part] -= now;
        at += now;
        missing += link.parts.nbytes[part];
      }
      if (missing != 0) break;
      link.in_payload = false;
      if (!sink.arrived(link.peer, link.header)) return false;
      if (!link.channel) return true;  // the frame made the sink close the link
      link.has_rest = link.header.nbytes >= kLongPayloadBytes &&
                      link.input_bytes - at >= sizeof(FrameHeader) && sink.has_reader();
      if (!link.has_rest) continue;
      has_stopped_ = true;
      break;
    }
    if (link.input_bytes - at < sizeof(FrameHeader)) break;
    std::memcpy(&link.header, link.input + at, sizeof(FrameHeader));
    at += sizeof(FrameHeader);
    link.parts = {};
    if (!sink.place(link.peer, link.header, &link.parts)) return false;
    link.to_skip = link.parts.num_parts == 0 ? link.header.nbytes : 0;
    link.in_payload = true;
  }
  std::memmove(link.input, link.input + at, link.input_bytes - at);
  link.input_bytes -= at;
  return true;
}

bool TcpWire::refuse(Link& link, FrameSink& sink) {
  close(link.peer);
  sink.lost(link.peer, EPROTO);
  return true;
}

void TcpWire::fail(Link& link, FrameSink& sink, int error) {
  if (!link.channel) return;
  close(link.peer);
  // TLS reports EPROTO, too: then the bytes are not known to be the peer's.
  sink.lost(link.peer, error == EPROTO ? EIO : error);
}

/// Also checks the kernel's queue: closing a socket while frames come in sends a reset, which
/// discards its unacknowledged bytes.
bool TcpWire::has_delivered() const {
  if (has_unsent()) return false;
  return std::all_of(present_.begin(), present_.end(), [](const Link* link) {
    int in_kernel = 0;
    return !link->channel || ::ioctl(link->channel.fd(), SIOCOUTQ, &in_kernel) != 0 ||
           in_kernel == 0;
  });
}

void TcpWire::close(int peer) {
  Link& link = *links_[static_cast<size_t>(peer)];
  num_unsent_ -= link.unsent.size();
  link.unsent.clear();
  link.unsent_memory = 0;
  link.in_payload = link.has_rest = false;
  link.channel.reset();
}

void TcpWire::wait(int64_t ns) {
  if (may_have_more_) return;
  epoll_event events[64];
  const int ms = static_cast<int>(std::max<int64_t>(1, ns / 1'000'000));
  const int num_events = ::epoll_wait(epoll_.get(), events, std::size(events), ms);
  for (int i = 0; i < num_events; ++i) {
    if (events[i].data.u32 == kWakeEvent) wakeup_.clear();
  }
}

void TcpWire::pause(int64_t ns) { wakeup_.wait(ns); }
void TcpWire::wake() { wakeup_.give(); }

void TcpWire::let_go(const std::byte* begin, const std::byte* end) {
  for (Link* link : present_) {
    for (Unsent& frame : link->unsent) {
      if (frame.own != nullptr || frame.payload < begin || frame.payload >= end) continue;
      keep(*link, frame, nullptr);
    }
  }
}

void TcpWire::discard(int peer) {
  Link& link = *links_[static_cast<size_t>(peer)];
  if (!link.in_payload) return;
  link.to_skip += link.parts.nbytes[0] + link.parts.nbytes[1];
  link.parts = {};
}

void TcpWire::disown() {
  for (Link* link : present_) link->channel.reset();
  epoll_.reset();
  wakeup_.close();
}

}  // namespace pycoll
