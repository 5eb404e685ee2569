// Threads of the core: a thread that cannot start, or that fails, is an error of the ranks and does
// not end the process.
#pragma once

#include <signal.h>

#include <functional>
#include <string>
#include <thread>

namespace pycoll {

/// Receives the error that ended a thread, on that thread: "WHAT failed: REASON".
using ReportError = std::function<void(const std::string& text)>;

/// Starts a thread that runs `body`. Raises SystemError, which names the thread as `what`, if the
/// system has none. An error that leaves `body` goes to `report`; the thread then ends. A body that
/// reports its errors itself needs no `report`.
std::thread start_thread(std::string what, std::function<void()> body, ReportError report);

/// Each other thread of this process executes a full fence before this returns. So of two threads,
/// one that stores a word and loads another without a fence, and one that stores the second word,
/// calls this and loads the first, at least one sees the other's store.
void fence_other_threads();

/// Whether this is the thread that the process began with, or the only one of a forked process.
bool is_main_thread();

/// Blocks all signals while it lives. A thread that starts meanwhile inherits the mask, so signal
/// handlers run on the user's threads.
class BlockedSignals {
 public:
  BlockedSignals();
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace pycoll
