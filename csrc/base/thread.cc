#include "base/thread.h"

#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace pycoll {
namespace {

struct Start {
  std::string what;
  std::function<void()> body;
  ReportError report;

  void run() {
    try {
      body();
    } catch (const std::exception& error) {
      try {
        if (report) report(what + " failed: " + error.what());
      } catch (const std::exception&) {
        // No memory is left for the report: deadlines end the other ranks' waits.
      }
    }
  }
};

// Short, because other ranks see no more than NameTable::kMaxText bytes of a reason.
std::string advice_for(int error) { return error == EAGAIN ? " (see ulimit -u, pids.max)" : ""; }

}  // namespace

std::thread start_thread(std::string what, std::function<void()> body, ReportError report) {
  const auto start = std::make_shared<Start>(std::move(what), std::move(body), std::move(report));
  try {
    return std::thread([start] { start->run(); });
  } catch (const std::system_error& error) {
    throw SystemError(start->what + " did not start: " + error.code().message() +
                      advice_for(error.code().value()));
  }
}

void fence_other_threads() {
  const auto barrier = [](int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; };
  // Microseconds; for all processes it is milliseconds.
  if (barrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) &&
      barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED)) {
    return;
  }
  // Where the system forbids the call, stores reach other cores long before the nap ends.
  if (!barrier(MEMBARRIER_CMD_GLOBAL)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

bool is_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

BlockedSignals::BlockedSignals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}

BlockedSignals::~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

}  // namespace pycoll
