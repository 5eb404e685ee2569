#include "comm/async/work.h"

#include <chrono>

namespace pycoll {

bool Work::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool Work::ended(double timeout_s) const {
  std::unique_lock lock(mutex_);
  return over_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done_; });
}

bool Work::wait(double timeout_s) const {
  const bool over = ended(timeout_s);
  if (over) {
    if (const std::exception_ptr ended_by = error()) std::rethrow_exception(ended_by);
  }
  return over;
}

std::exception_ptr Work::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Work::finish(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    error_ = std::move(error);
  }
  over_.notify_all();
}

}  // namespace pycoll
