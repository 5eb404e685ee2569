// The end of links over MPI. MPI may access a message's memory until its request is done, so the
// memory of requests that cannot be completed is never freed.
#include <sched.h>

#include <algorithm>
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

/// Stops receiving from the link's peer. Receives that MPI cannot cancel stay posted.
void MpiWire::drop(Link& link) {
  link.open = false;
  for (size_t at = purposes_.size(); at-- > 0;) {
    if (purposes_[at].link == &link && purposes_[at].sent.bytes == nullptr) remove(at);
  }
  for (MPI_Request& request : link.requests) {
    if (request == MPI_REQUEST_NULL) continue;
    int done = 0;
    api_.Cancel(&request);
    api_.Test(&request, &done, MPI_STATUS_IGNORE);
  }
}

void MpiWire::say_goodbye() {
  if (is_over() || said_goodbye_) return;
  FrameHeader goodbye;
  goodbye.spare = kGoodbye;
  for (Link* link : present_) {
    if (link->open && link->failed < 0) send(link->peer, goodbye, nullptr, Rest::stays());
  }
  said_goodbye_ = true;
}

/// Reads and discards messages until the peer's goodbye. True if it has come or can never come.
bool MpiWire::has_heard_goodbye(Link& link) {
  for (int i = 0; link.open && i < kMaxLastWords; ++i) {
    if (link.next_bytes == 0) {
      int is_here = 0;
      MPI_Status status;
      if (api_.Test(&link.requests[link.next], &is_here, &status) != MPI_SUCCESS) break;
      if (is_here == 0) return false;
      note_next(link, status);
    }
    FrameHeader header;
    if (link.next_bytes >= sizeof(header)) {
      std::memcpy(&header, link.posted[link.next]->frame, sizeof(header));
    }
    if (header.spare == kGoodbye) break;
    link.next_bytes = 0;
    post(link, link.next);
    link.next = (link.next + 1) % kNumPosted;
  }
  return true;
}

bool MpiWire::complete_sends() {
  for (size_t at = purposes_.size(); at-- > 0;) {
    int done = 0;
    const int code = api_.Test(&requests_[at], &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS || done != 0) remove(at);
  }
  return purposes_.empty();
}

void MpiWire::end(int64_t patience_ns) {
  if (is_over()) return;
  say_goodbye();
  for (size_t at = purposes_.size(); at-- > 0;) {
    if (purposes_[at].sent.bytes == nullptr) remove(at);
  }
  const int64_t end_ns = now_ns() + patience_ns;
  for (bool all_done = false; !all_done && now_ns() < end_ns;) {
    all_done = complete_sends();
    // Some MPIs report unreceived messages in MPI_Finalize.
    for (Link* link : present_) all_done = has_heard_goodbye(*link) && all_done;
    if (!all_done) ::sched_yield();
  }
  ended_ = true;
  for (Link* link : present_) drop(*link);
  leave_to_mpi();
}

/// Leaks the memory of all requests that are not done: MPI may still access it.
void MpiWire::leave_to_mpi() {
  for (Purpose& purpose : purposes_) (void)purpose.sent.bytes.release();
  for (auto& link : links_) {
    if (link == nullptr) continue;
    const bool receives =
        std::any_of(link->requests.begin(), link->requests.end(),
                    [](MPI_Request request) { return request != MPI_REQUEST_NULL; });
    if (receives) (void)link.release();
  }
  num_sends_ = 0;
  requests_.clear();
  purposes_.clear();
}

void MpiWire::disown() {
  disowned_ = true;
  comm_->disown();
  wakeup_.close();
}

}  // namespace pycoll::PYCOLL_MPI_ABI
