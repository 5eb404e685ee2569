// The communicator's operations on device arrays if its ranks are on several hosts.
#include <string>

#include "base/error.h"
#include "comm/communicator.h"
#include "comm/device/device_pause.h"
#include "comm/device/staging/cpu_staging.h"
#include "device/device_library.h"

namespace pycoll {

void Communicator::open_staging(const Call& call) {
  const Device device(device_table(), call.device);
  if (call.stream != nullptr && device.capture_of(call.stream) != 0) {
    throw UsageError(std::string(info(call.collective).name) +
                     ": cannot be captured when the ranks are on several hosts, because the CPUs "
                     "move the bytes");
  }
  if (staging_ == nullptr) {
    staging_ = std::make_unique<CpuStaging>(device, rank_, num_ranks_);
  } else if (staging_->device().index() != call.device) {
    throw UsageError(std::string(info(call.collective).name) + ": the array is on device " +
                     std::to_string(call.device) + ", expected " + staging_->device().title() +
                     ": a communicator uses one device per rank");
  }
}

// Returns early if the communicator is broken: the next CPU operation raises the error.
void Communicator::wait_for_device(const StreamEvent& event) {
  DevicePause pause;
  while (!event.is_over()) {
    if (load_acquire(segment_.failure_word()) != 0) return;
    if (waiter_.interrupted && waiter_.interrupted()) fail_aborted();
    pause.once();
  }
}

void Communicator::execute_staged(const Call& call, const StreamEvent& begun,
                                  const OnSlow& on_slow) {
  check_reduction(call);
  on_slow();
  if (call.send_counts != nullptr) agree_on_counts(call, {});
  staging_->run(
      call, begun, [this](const StreamEvent& event) { wait_for_device(event); },
      [this](const Call& host) { perform(host, {}); });
}

void Communicator::execute_staged(const Call& call, const OnSlow& on_slow) {
  open_staging(call);
  StreamEvent begun(staging_->device());
  begun.record(call.stream);
  execute_staged(call, begun, on_slow);
}

std::shared_ptr<DeviceWork> Communicator::start_staged(const Call& call,
                                                       std::shared_ptr<void> keep_alive) {
  if (staging_ == nullptr) after_queued([&] { open_staging(call); });
  open_staging(call);  // checks the device and the stream
  const Device& device = staging_->device();
  auto begun = std::make_shared<StreamEvent>(device);
  begun->record(call.stream);
  auto work = std::make_shared<DeviceWork>(device, 0, std::move(keep_alive), nullptr);
  work->follow(progress().submit([this, call, begun, work, name = std::string(call.algorithm)] {
    const std::lock_guard lock(run_mutex_);
    Call own = call;
    own.algorithm = name;
    own.stream = staging_->delivering();  // DeviceWork::hold makes the caller's stream wait
    execute_staged(own, *begun, {});
    work->over().record(own.stream);
  }));
  return work;
}

void Communicator::synchronize_staged() {
  after_queued([&] {
    if (staging_ != nullptr) wait_for_device(staging_->over());
  });
}

}  // namespace pycoll
