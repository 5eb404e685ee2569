// How links over MPI end: MPI may read and write a message's memory until its request is done, so
// what cannot be brought to an end keeps its memory.
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "mpi/mpi_wire.h"

namespace pycoll::PYCOLL_MPI_ABI {
namespace {

constexpr int kMaxLastWords = 1000;

}  // namespace

void MpiWire::fail(Link& link, FrameSink& sink, int error) {
  drop(link);
  sink.lost(link.peer, error);
}

void MpiWire::close(int peer) {
  const std::lock_guard lock(shared_.mutex);
  if (!is_over()) drop(*links_[static_cast<size_t>(peer)]);
}

/// No more messages from there. Receives that MPI does not give back stay.
void MpiWire::drop(Link& link) {
  link.open = false;
  for (size_t at = purposes_.size(); at-- > 0;) {
    if (purposes_[at].link == &link && purposes_[at].kind == Kind::kFirst) remove(at);
  }
  for (MPI_Request& request : link.requests) {
    if (request == MPI_REQUEST_NULL) continue;
    int done = 0;
    api_.Cancel(&request);
    api_.Test(&request, &done, MPI_STATUS_IGNORE);
  }
}

bool MpiWire::let_go(const std::byte* begin, const std::byte* end) {
  const std::lock_guard lock(shared_.mutex);
  if (is_over()) return true;
  bool all_gone = true;
  for (size_t at = purposes_.size(); at-- > 0;) {
    Purpose& purpose = purposes_[at];
    if (purpose.payload == nullptr || purpose.payload < begin || purpose.payload >= end) continue;
    int done = 0;
    MPI_Status status;
    if (purpose.kind == Kind::kPayload) api_.Cancel(&requests_[at]);
    if (api_.Test(&requests_[at], &done, &status) != MPI_SUCCESS) done = 1;
    if (done == 0) {
      all_gone = false;
      continue;
    }
    if (purpose.kind == Kind::kPayload) redirect(purpose, status);
    remove(at);
  }
  return all_gone;
}

/// A payload whose place is gone: what is still to come goes nowhere, but must be received.
void MpiWire::redirect(const Purpose& purpose, const MPI_Status& status) {
  Link& link = *purpose.link;
  const auto frame =
      std::find_if(link.incoming.begin(), link.incoming.end(),
                   [&](const Incoming& one) { return one.number == purpose.number; });
  if (frame == link.incoming.end()) return;
  int cancelled = 0;
  api_.Test_cancelled(&status, &cancelled);
  if (cancelled == 0) {
    frame->is_here = true;
    return;
  }
  frame->own.reset(new std::byte[purpose.nbytes]);
  MPI_Request request = MPI_REQUEST_NULL;
  if (api_.Irecv(frame->own.get(), static_cast<int>(purpose.nbytes), MPI_BYTE, link.peer,
                 purpose.tag, comm_->get(), &request) != MPI_SUCCESS) {
    link.failed = EIO;
    return;
  }
  Purpose next{.kind = Kind::kPayload, .link = &link, .number = purpose.number};
  next.nbytes = purpose.nbytes;
  next.tag = purpose.tag;
  add(request, std::move(next));
}

void MpiWire::say_goodbye() {
  if (is_over() || said_goodbye_) return;
  FrameHeader goodbye;
  goodbye.spare = kGoodbye;
  for (Link* link : present_) {
    if (link->open && link->failed < 0) send(link->peer, goodbye, nullptr, false);
  }
  said_goodbye_ = true;
}

/// Reads on, without heed, until a peer's goodbye. True when it has come, or never will.
bool MpiWire::has_heard_goodbye(Link& link) {
  for (int i = 0; link.open && i < kMaxLastWords; ++i) {
    int is_here = link.next_bytes != 0;
    MPI_Request& request = link.requests[link.next];
    if (is_here == 0 && api_.Test(&request, &is_here, MPI_STATUS_IGNORE) != MPI_SUCCESS)
      return true;
    if (is_here == 0) return false;
    FrameHeader header;
    std::memcpy(&header, link.posted[link.next].bytes, sizeof(header));
    if (header.spare == kGoodbye) return true;
    link.next_bytes = 0;
    post_first(link, link.next);
    link.next = (link.next + 1) % kNumPosted;
  }
  return true;
}

void MpiWire::end(int64_t patience_ns) {
  if (is_over()) return;
  say_goodbye();
  for (size_t at = purposes_.size(); at-- > 0;) {
    if (purposes_[at].kind == Kind::kFirst) remove(at);
  }
  const int64_t end_ns = now_ns() + patience_ns;
  for (bool all_done = false; !all_done;) {
    all_done = true;
    for (size_t at = purposes_.size(); at-- > 0;) {
      if (purposes_[at].kind != Kind::kSend) continue;
      int done = 0;
      if (api_.Test(&requests_[at], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0) {
        all_done = false;
      } else {
        remove(at);
      }
    }
    // What nobody receives some MPIs complain of at their end.
    for (Link* link : present_) all_done = has_heard_goodbye(*link) && all_done;
    if (now_ns() >= end_ns) break;
    if (!all_done) ::sched_yield();
  }
  ended_ = true;
  for (Link* link : present_) drop(*link);
  for (size_t at = purposes_.size(); at-- > 0;) {
    int done = 0;
    if (purposes_[at].kind == Kind::kPayload) api_.Cancel(&requests_[at]);
    api_.Test(&requests_[at], &done, MPI_STATUS_IGNORE);
    if (done != 0) remove(at);
  }
  leave_to_mpi();
}

/// What is not done now never may be: its memory stays with MPI.
void MpiWire::leave_to_mpi() {
  const auto is_pending = [](MPI_Request request) { return request != MPI_REQUEST_NULL; };
  for (Purpose& purpose : purposes_) {
    (void)purpose.message.release();
    (void)purpose.own.release();
  }
  for (auto& link : links_) {
    if (link == nullptr) continue;
    const bool receives = std::any_of(link->requests.begin(), link->requests.end(), is_pending);
    const bool awaits = std::any_of(purposes_.begin(), purposes_.end(), [&](const Purpose& one) {
      return one.kind == Kind::kPayload && one.link == link.get();
    });
    if (receives || awaits) (void)link.release();
  }
  requests_.clear();
  purposes_.clear();
}

void MpiWire::disown() {
  disowned_ = true;
  comm_->disown();
  kick_.close();
}

}  // namespace pycoll::PYCOLL_MPI_ABI
