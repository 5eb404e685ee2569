#include "comm/device/device_work.h"

#include <utility>

#include "base/clock.h"
#include "comm/device/device_pause.h"

namespace pycoll {

DeviceWork::DeviceWork(const Device& device, uint64_t sequence, std::shared_ptr<void> keep_alive,
                       std::function<std::exception_ptr(uint64_t sequence)> ended_by)
    : over_(device),
      sequence_(sequence),
      keep_alive_(std::move(keep_alive)),
      ended_by_(std::move(ended_by)) {}

bool DeviceWork::given(double timeout_s) const {
  return giving_ == nullptr || giving_->ended(timeout_s);
}

bool DeviceWork::done() {
  if (!given(0) || !over_.is_over()) return false;
  settle();
  return true;
}

void DeviceWork::settle() {
  std::shared_ptr<void> let_go;
  const std::lock_guard lock(mutex_);
  if (ended_by_) error_ = std::exchange(ended_by_, nullptr)(sequence_);
  if (giving_ != nullptr) error_ = giving_->error();
  let_go.swap(keep_alive_);
}

void DeviceWork::hold(DeviceStream stream) {
  if (giving_ != nullptr) (void)giving_->wait(0);  // raises its error
  over_.hold(stream);
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

bool DeviceWork::wait(double timeout_s) {
  const Deadline deadline = Deadline::after_s(timeout_s);
  DevicePause pause;
  while (!done()) {
    if (deadline.expired()) return false;
    pause.once();
  }
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  return true;
}

std::exception_ptr DeviceWork::error() {
  if (!done()) return nullptr;
  const std::lock_guard lock(mutex_);
  return error_;
}

}  // namespace pycoll
