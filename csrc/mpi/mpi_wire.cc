#include "mpi/mpi_wire.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/pages.h"

namespace pycoll::PYCOLL_MPI_ABI {
namespace {

constexpr int kTag = 1;
// A waiting rank first yields, then sleeps for longer and longer: MPI cannot wake it.
constexpr int kYields = 64;
constexpr int64_t kShortestNapNs = 30'000;
constexpr int kMaxDoublings = 5;
constexpr int64_t kPatienceNs =
    50'000'000;  // how long an ending wire waits for its peers' goodbyes

}  // namespace

MpiWire::MpiWire(std::shared_ptr<Comm> comm, const std::vector<int>& peers)
    : comm_(std::move(comm)), shared_(*comm_->shared()), api_(shared_.api) {
  const std::lock_guard lock(shared_.mutex);
  links_.resize(static_cast<size_t>(comm_->size()));
  for (const int peer : peers) {
    links_[static_cast<size_t>(peer)] = std::make_unique<Link>();
    Link& link = *links_[static_cast<size_t>(peer)];
    for (auto& memory : link.posted) memory = std::make_unique_for_overwrite<FrameMemory>();
    link.peer = peer;
    present_.push_back(&link);
    for (size_t at = 0; at < kNumPosted; ++at) post(link, at);
    add(link.requests[0], {.link = &link});
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

// Requests that are passed to MPI_Testsome.

void MpiWire::add(MPI_Request request, Purpose purpose) {
  if (purpose.sent.bytes != nullptr) {
    ++num_sends_;
    ++purpose.link->num_sends;
    purpose.link->unsent_bytes += purpose.sent.capacity;
  }
  requests_.push_back(request);
  purposes_.push_back(std::move(purpose));
}

void MpiWire::remove(size_t at) {
  Purpose& purpose = purposes_[at];
  if (purpose.sent.bytes != nullptr) {
    --num_sends_;
    --purpose.link->num_sends;
    purpose.link->unsent_bytes -= purpose.sent.capacity;
    give_back(std::move(purpose.sent));
  }
  requests_[at] = requests_.back();
  requests_.pop_back();
  if (at + 1 != purposes_.size()) purpose = std::move(purposes_.back());
  purposes_.pop_back();
}

void MpiWire::post(Link& link, size_t at) {
  const int code = api_.Irecv(link.posted[at]->frame, kMessageBytes, MPI_BYTE, link.peer, kTag,
                              comm_->get(), &link.requests[at]);
  if (code == MPI_SUCCESS) return;
  link.requests[at] = MPI_REQUEST_NULL;
  link.failed = EIO;
}

void MpiWire::note_next(Link& link, const MPI_Status& status) {
  int nbytes = 0;
  api_.Get_count(&status, MPI_BYTE, &nbytes);
  link.requests[link.next] = MPI_REQUEST_NULL;
  link.next_bytes = static_cast<size_t>(std::max(nbytes, 0));
  if (link.next_bytes == 0) link.failed = EPROTO;  // 0 would mean that nothing has come
}

/// Asks MPI once which requests are done. Returns true if any is.
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
    const Purpose& purpose = purposes_[static_cast<size_t>(done_[static_cast<size_t>(i)])];
    const MPI_Status& status = statuses_[static_cast<size_t>(i)];
    if (code != MPI_SUCCESS && status.MPI_ERROR != MPI_SUCCESS) {
      purpose.link->failed = EIO;
    } else if (purpose.sent.bytes == nullptr) {
      note_next(*purpose.link, status);
    }
  }
  // In descending order, because remove() moves the last request into the gap.
  std::sort(done_.begin(), done_.begin() + num_done, std::greater<>());
  for (int i = 0; i < num_done; ++i) remove(static_cast<size_t>(done_[static_cast<size_t>(i)]));
  return true;
}

MpiWire::Outgoing MpiWire::take_memory(size_t nbytes) {
  const size_t capacity = nbytes <= kSmallBytes ? kSmallBytes : kMessageBytes;
  if (capacity == kSmallBytes || spares_.empty()) {
    return {std::make_unique_for_overwrite<std::byte[]>(capacity), capacity};
  }
  Outgoing spare = std::move(spares_.back());
  spares_.pop_back();
  return spare;
}

void MpiWire::give_back(Outgoing message) {
  const bool is_kept = message.capacity == kMessageBytes && spares_.size() < kMaxSpares;
  if (is_kept) spares_.push_back(std::move(message));
}

void MpiWire::send(int peer, const FrameHeader& header, const void* payload, Rest) {
  const std::lock_guard lock(shared_.mutex);
  Link& link = *links_[static_cast<size_t>(peer)];
  if (is_over() || !link.open || link.failed >= 0) return;
  if (header.nbytes > kMaxPayloadBytes || link.unsent_bytes >= kMaxUnsentBytes) {
    link.failed = header.nbytes > kMaxPayloadBytes ? EMSGSIZE : EDQUOT;
    return;
  }
  if (header.kind == FrameKind::kFailure) shared_.saw_failure = true;
  Outgoing message = take_memory(sizeof(header) + header.nbytes);
  std::byte* bytes = message.bytes.get();
  std::memcpy(bytes, &header, sizeof(header));
  if (header.nbytes != 0) std::memcpy(bytes + sizeof(header), payload, header.nbytes);
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = api_.Isend(bytes, static_cast<int>(sizeof(header) + header.nbytes), MPI_BYTE,
                              peer, kTag, comm_->get(), &request);
  if (code != MPI_SUCCESS) {
    link.failed = EIO;
    return;
  }
  // A short message is mostly sent at once, so its request need not be kept.
  int is_sent = 0;
  if (api_.Test(&request, &is_sent, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
    link.failed = EIO;
  } else if (is_sent != 0) {
    give_back(std::move(message));
  } else {
    add(request, {.link = &link, .sent = std::move(message)});
  }
}

bool MpiWire::poll(FrameSink& sink, int) {
  const std::lock_guard lock(shared_.mutex);
  if (is_over()) return false;
  bool moved = complete();
  for (Link* link : present_) {
    if (!link->open) continue;
    const bool came = take(*link, sink);
    moved = moved || came;
    // Messages that came before the failure are still valid.
    if (link->open && link->failed >= 0 && !came) fail(*link, sink, link->failed);
  }
  if (moved) num_idle_ = 0;
  return moved;
}

/// Delivers the next message, if it has come. Further messages of this link wait for the next poll:
/// testing for them now would delay this one.
bool MpiWire::take(Link& link, FrameSink& sink) {
  if (link.next_bytes == 0) return false;
  const std::byte* from = link.posted[link.next]->frame;
  FrameHeader header;
  const bool has_header = link.next_bytes >= sizeof(header);
  if (has_header) std::memcpy(&header, from, sizeof(header));
  from += sizeof(header);
  PayloadParts parts;
  if (!has_header || link.next_bytes != sizeof(header) + header.nbytes ||
      (header.spare != kGoodbye && !sink.place(link.peer, header, &parts))) {
    fail(link, sink, EPROTO);
    return true;
  }
  if (header.spare == kGoodbye) {
    fail(link, sink, 0);
    return true;
  }
  if (header.kind == FrameKind::kFailure) shared_.saw_failure = true;
  const bool is_swapped = header.nbytes >= kLongPayloadBytes &&
                          sink.swap_memory(link.peer, header, link.posted[link.next]);
  for (int part = 0; part < parts.num_parts && !is_swapped; ++part) {
    if (parts.nbytes[part] != 0) std::memcpy(parts.data[part], from, parts.nbytes[part]);
    from += parts.nbytes[part];
  }
  const size_t taken = link.next;
  link.next = (link.next + 1) % kNumPosted;
  link.next_bytes = 0;
  if (!sink.arrived(link.peer, header)) fail(link, sink, EPROTO);
  if (!link.open) return true;  // closed by that frame
  post(link, taken);
  add(link.requests[link.next], {.link = &link});
  // The first long messages would wait for pages of eight receives, one after another.
  if (header.nbytes >= kLongPayloadBytes && header.nbytes > link.populated_bytes) {
    link.populated_bytes = header.nbytes;
    for (auto& memory : link.posted) populate(memory->frame, sizeof(header) + header.nbytes);
  }
  return true;
}

void MpiWire::wait(int64_t ns) {
  const int idle = num_idle_.fetch_add(1);
  if (idle < kYields) {
    ::sched_yield();
    return;
  }
  const int doublings = std::min((idle - kYields) / 8, kMaxDoublings);
  wakeup_.wait(std::min(ns, kShortestNapNs << doublings));
}

void MpiWire::pause(int64_t ns) { wakeup_.wait(ns); }
void MpiWire::wake() { wakeup_.give(); }

}  // namespace pycoll::PYCOLL_MPI_ABI
