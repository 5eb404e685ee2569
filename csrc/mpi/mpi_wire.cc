#include "mpi/mpi_wire.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "transport/pump.h"

namespace pycoll::PYCOLL_MPI_ABI {
namespace {

constexpr int kFirstTag = 1;
constexpr int kPayloadTag = 2;
constexpr uint32_t kNumPayloadTags = 16384;  // of one peer under way: far fewer
constexpr int kMaxFrames = 16;               // from one peer in one poll, so that nobody starves
// Who waits first gives way to others, then sleeps, longer and longer: MPI wakes nobody.
constexpr int kYields = 64;
constexpr int64_t kShortestNapNs = 30'000;
constexpr int kMaxDoublings = 5;
constexpr int64_t kPatienceNs = 50'000'000;  // of one that ends, for its peers to end, too

}  // namespace

MpiWire::MpiWire(std::shared_ptr<Comm> comm, const std::vector<int>& peers)
    : comm_(std::move(comm)), shared_(*comm_->shared()), api_(shared_.api) {
  const std::lock_guard lock(shared_.mutex);
  links_.resize(static_cast<size_t>(comm_->size()));
  for (const int peer : peers) {
    links_[static_cast<size_t>(peer)] = std::make_unique<Link>();
    Link& link = *links_[static_cast<size_t>(peer)];
    link.peer = peer;
    present_.push_back(&link);
    for (size_t at = 0; at < kNumPosted; ++at) post_first(link, at);
    add(link.requests[0], {.kind = Kind::kFirst, .link = &link});
  }
  shared_.wires.insert(this);
}

MpiWire::~MpiWire() {
  if (disowned_) {
    for (auto& link : links_) (void)link.release();
    return;
  }
  const std::lock_guard lock(shared_.mutex);
  shared_.wires.erase(this);
  end(kPatienceNs);
}

// What MPI is asked about.

void MpiWire::add(MPI_Request request, Purpose purpose) {
  requests_.push_back(request);
  purposes_.push_back(std::move(purpose));
}

void MpiWire::remove(size_t at) {
  Purpose& purpose = purposes_[at];
  if (purpose.kind == Kind::kSend) {
    --num_sends_;
    if (purpose.message != nullptr) spare_.push_back(std::move(purpose.message));
  }
  requests_[at] = requests_.back();
  requests_.pop_back();
  if (at + 1 != purposes_.size()) purpose = std::move(purposes_.back());
  purposes_.pop_back();
}

void MpiWire::post_first(Link& link, size_t at) {
  const int code = api_.Irecv(link.posted[at].bytes, kMessageBytes, MPI_BYTE, link.peer, kFirstTag,
                              comm_->get(), &link.requests[at]);
  if (code == MPI_SUCCESS) return;
  link.requests[at] = MPI_REQUEST_NULL;
  link.failed = EIO;
}

std::unique_ptr<MpiWire::Message> MpiWire::take_message() {
  if (spare_.empty()) return std::make_unique<Message>();
  std::unique_ptr<Message> message = std::move(spare_.back());
  spare_.pop_back();
  return message;
}

/// Asks once what is done. True when something is.
bool MpiWire::complete() {
  const auto num_requests = static_cast<int>(requests_.size());
  if (num_requests == 0) return false;
  done_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int num_done = 0;
  const int code =
      api_.Testsome(num_requests, requests_.data(), &num_done, done_.data(), statuses_.data());
  if (num_done == MPI_UNDEFINED || num_done <= 0) return false;
  for (int i = 0; i < num_done; ++i) {
    Purpose& purpose = purposes_[static_cast<size_t>(done_[i])];
    Link& link = *purpose.link;
    MPI_Status& status = statuses_[static_cast<size_t>(i)];
    if (code != MPI_SUCCESS && status.MPI_ERROR != MPI_SUCCESS) {
      link.failed = EIO;
      continue;
    }
    if (purpose.kind == Kind::kFirst) {
      int nbytes = 0;
      api_.Get_count(&status, MPI_BYTE, &nbytes);
      link.requests[link.next] = MPI_REQUEST_NULL;
      link.next_bytes = static_cast<size_t>(std::max(nbytes, 0));
    } else if (purpose.kind == Kind::kPayload) {
      for (Incoming& frame : link.incoming) frame.is_here |= frame.number == purpose.number;
    }
  }
  // From the end, where remove() takes its replacements from.
  std::sort(done_.begin(), done_.begin() + num_done, std::greater<>());
  for (int i = 0; i < num_done; ++i) remove(static_cast<size_t>(done_[i]));
  return true;
}

// Sending.

void MpiWire::isend(Link& link, const void* data, size_t nbytes, int tag, Purpose purpose) {
  MPI_Request request = MPI_REQUEST_NULL;
  purpose.kind = Kind::kSend;
  purpose.link = &link;
  purpose.nbytes = nbytes;
  const int code =
      api_.Isend(data, static_cast<int>(nbytes), MPI_BYTE, link.peer, tag, comm_->get(), &request);
  if (code != MPI_SUCCESS) {
    link.failed = EIO;
    return;
  }
  add(request, std::move(purpose));
  ++num_sends_;
}

void MpiWire::send(int peer, const FrameHeader& header, const void* payload, bool keep) {
  const std::lock_guard lock(shared_.mutex);
  Link& link = *links_[static_cast<size_t>(peer)];
  if (is_over() || !link.open || link.failed >= 0) return;
  if (header.kind == FrameKind::kFailure) shared_.saw_failure = true;
  const bool whole = header.nbytes <= kInlineBytes;
  Purpose first;
  first.message = take_message();
  std::byte* const bytes = first.message->bytes;
  std::memcpy(bytes, &header, sizeof(header));
  if (whole && header.nbytes != 0) std::memcpy(bytes + sizeof(header), payload, header.nbytes);
  isend(link, bytes, sizeof(header) + (whole ? header.nbytes : 0), kFirstTag, std::move(first));
  if (whole) return;
  Purpose second;
  if (keep) {
    second.own.reset(new std::byte[header.nbytes]);
    std::memcpy(second.own.get(), payload, header.nbytes);
    payload = second.own.get();
  } else {
    second.payload = static_cast<const std::byte*>(payload);
  }
  const uint32_t number = link.num_payloads_out++ % kNumPayloadTags;
  isend(link, payload, header.nbytes, kPayloadTag + static_cast<int>(number), std::move(second));
}

// Receiving.

bool MpiWire::poll(FrameSink& sink, int) {
  const std::lock_guard lock(shared_.mutex);
  if (is_over()) return false;
  bool moved = complete();
  for (Link* link : present_) {
    if (!link->open) continue;
    const bool came = take(*link, sink);
    moved = moved || came;
    // What had come before it failed is still good.
    if (link->open && link->failed >= 0 && !came) fail(*link, sink, link->failed);
  }
  if (moved) num_idle_ = 0;
  return moved;
}

/// Hands on what has come, in order.
bool MpiWire::take(Link& link, FrameSink& sink) {
  bool moved = false;
  for (int i = 0; i < kMaxFrames && link.open; ++i) {
    if (!link.incoming.empty() && link.incoming.front().is_here) {
      const Incoming frame = std::move(link.incoming.front());
      link.incoming.pop_front();
      if (!frame.is_placed && !deliver(link, frame.header, frame.own.get(), sink)) return true;
      moved = true;
      sink.arrived(link.peer, frame.header);
      continue;
    }
    if (link.next_bytes == 0 || !take_first(link, sink)) break;
    moved = true;
  }
  return moved;
}

/// Puts a payload that is here into its place.
bool MpiWire::deliver(Link& link, const FrameHeader& header, const std::byte* from,
                      FrameSink& sink) {
  PayloadParts parts;
  if (!sink.place(link.peer, header, &parts)) {
    fail(link, sink, EPROTO);
    return false;
  }
  for (int part = 0; part < parts.num_parts; ++part) {
    std::memcpy(parts.data[part], from, parts.nbytes[part]);
    from += parts.nbytes[part];
  }
  return true;
}

/// The first message of a frame. False when it has to wait for frames before it.
bool MpiWire::take_first(Link& link, FrameSink& sink) {
  Message& message = link.posted[link.next];
  FrameHeader header;
  std::memcpy(&header, message.bytes, sizeof(header));
  const bool whole = header.nbytes <= kInlineBytes;
  if (whole && !link.incoming.empty()) return false;
  if (link.next_bytes != sizeof(header) + (whole ? header.nbytes : 0) ||
      header.nbytes > Pump::kMaxPayloadBytes) {
    fail(link, sink, EPROTO);
    return true;
  }
  if (header.kind == FrameKind::kFailure) shared_.saw_failure = true;
  if (header.spare == kGoodbye) {
    fail(link, sink, 0);
    return true;
  }
  if (whole ? !deliver(link, header, message.bytes + sizeof(header), sink)
            : !start_payload(link, header, sink)) {
    return true;
  }
  post_first(link, link.next);
  link.next = (link.next + 1) % kNumPosted;
  link.next_bytes = 0;
  int is_here = 0;
  MPI_Status status;
  MPI_Request& next = link.requests[link.next];
  if (next == MPI_REQUEST_NULL || api_.Test(&next, &is_here, &status) != MPI_SUCCESS) {
    link.failed = EIO;
  } else if (is_here != 0) {
    int nbytes = 0;
    api_.Get_count(&status, MPI_BYTE, &nbytes);
    link.next_bytes = static_cast<size_t>(std::max(nbytes, 0));
  } else {
    add(next, {.kind = Kind::kFirst, .link = &link});
  }
  if (whole) sink.arrived(link.peer, header);
  return true;
}

/// Receives a payload into its place, even while those before it are on their way, if it is one of
/// those that may be; else into memory of its own, until its turn has come.
bool MpiWire::start_payload(Link& link, const FrameHeader& header, FrameSink& sink) {
  Incoming frame;
  frame.header = header;
  frame.number = link.num_incoming++;
  PayloadParts parts;
  if (header.is_placed_ahead() && !sink.place(link.peer, header, &parts)) {
    fail(link, sink, EPROTO);
    return false;
  }
  frame.is_placed = parts.num_parts == 1 && parts.nbytes[0] == header.nbytes;
  if (!frame.is_placed) frame.own.reset(new std::byte[header.nbytes]);
  std::byte* const to = frame.is_placed ? parts.data[0] : frame.own.get();
  const int tag = kPayloadTag + static_cast<int>(link.num_payloads_in++ % kNumPayloadTags);
  MPI_Request request = MPI_REQUEST_NULL;
  if (api_.Irecv(to, static_cast<int>(header.nbytes), MPI_BYTE, link.peer, tag, comm_->get(),
                 &request) != MPI_SUCCESS) {
    fail(link, sink, EIO);
    return false;
  }
  Purpose purpose{.kind = Kind::kPayload, .link = &link, .number = frame.number};
  purpose.payload = frame.is_placed ? to : nullptr;
  purpose.nbytes = header.nbytes;
  purpose.tag = tag;
  add(request, std::move(purpose));
  link.incoming.push_back(std::move(frame));
  return true;
}

// Waiting.

void MpiWire::wait(int64_t ns) {
  const int idle = num_idle_.fetch_add(1);
  if (idle < kYields) {
    ::sched_yield();
    return;
  }
  const int doublings = std::min((idle - kYields) / 8, kMaxDoublings);
  kick_.wait(std::min(ns, kShortestNapNs << doublings));
}

void MpiWire::pause(int64_t ns) { kick_.wait(ns); }
void MpiWire::kick() { kick_.give(); }

}  // namespace pycoll::PYCOLL_MPI_ABI
