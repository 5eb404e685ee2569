// Wakes the thread that waits for a wire.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>

#include "base/error.h"
#include "base/fd.h"

namespace pycoll {

class Wakeup {
 public:
  Wakeup() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!event_) throw_system_error("eventfd for links to other hosts");
  }
  int fd() const { return event_.get(); }
  void give() {
    const uint64_t one = 1;
    if (::write(event_.get(), &one, sizeof(one)) < 0)
      return;  // the counter is full, so a wakeup is pending
  }
  /// Consumes all pending wakeups.
  void clear() {
    uint64_t count;
    if (::read(event_.get(), &count, sizeof(count)) < 0) return;
  }
  /// Sleeps until give(), or for `ns`.
  void wait(int64_t ns) {
    pollfd fd = {.fd = event_.get(), .events = POLLIN, .revents = 0};
    const timespec timeout = {static_cast<time_t>(ns / 1'000'000'000),
                              static_cast<long>(ns % 1'000'000'000)};
    if (::ppoll(&fd, 1, &timeout, nullptr) > 0) clear();
  }
  void close() { event_.reset(); }

 private:
  Fd event_;
};

}  // namespace pycoll
