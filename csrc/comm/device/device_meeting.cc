#include "comm/device/device_meeting.h"

#include <algorithm>

#include "base/error.h"

namespace pycoll {

DeviceMeeting::DeviceMeeting(const Device& device, std::vector<int> members)
    : device_(device),
      stream_(device),
      over_(device),
      launches_(device, members.size() * sizeof(DeviceLaunch)),
      staged_(members.size()) {
  for (const int rank : members) members_.push_back(Member{rank, StreamEvent(device), {}});
}

bool DeviceMeeting::launch(int rank, const DeviceLaunch& launch, DeviceStream stream,
                           Waiter& waiter) {
  uint64_t round = 0;
  int missing = rank;
  {
    const std::lock_guard lock(mutex_);
    const auto self = std::find_if(members_.begin(), members_.end(),
                                   [rank](const Member& member) { return member.rank == rank; });
    self->ready.record(stream);
    self->launch = launch;
    round = round_ + 1;
    if (++num_arrived_ == members_.size()) {
      num_arrived_ = 0;
      ++round_;
      if (!launch_all(waiter)) return false;
      store_release(launched_, round);
      waiter.wake_others();
    } else {
      // Names one rank that has not arrived. The wait watches that rank and reports all missing
      // ones.
      for (const Member& member : members_) {
        if (member.launch.operation < launch.operation) missing = member.rank;
      }
    }
  }
  const bool met =
      waiter.spin_until([&] { return load_acquire(launched_) >= round; }, {missing, 0, 0});
  if (!met) return false;
  if (load_acquire(failed_) != 0) {
    throw CudaError(device_.title() + ": the common launch of this device's ranks failed");
  }
  // The event is recorded again only after all members have arrived for the next operation.
  over_.hold(stream);
  return true;
}

bool DeviceMeeting::launch_all(Waiter& waiter) {
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].launch.digest != members_[0].launch.digest) {
      return waiter.mismatch(members_[i].rank == waiter.rank() ? members_[0].rank
                                                               : members_[i].rank);
    }
    staged_[i] = members_[i].launch;
  }
  try {
    for (const Member& member : members_) member.ready.hold(stream_.get());
    device_.copy(launches_.data(), staged_.data(), staged_.size() * sizeof(DeviceLaunch),
                 stream_.get());
    device_.check(
        device_.table().launch_together(device_.index(), staged_.data(),
                                        reinterpret_cast<const DeviceLaunch*>(launches_.data()),
                                        static_cast<int32_t>(staged_.size()), stream_.get()),
        "the common launch of this device's ranks");
    over_.record(stream_.get());
  } catch (const CudaError&) {
    store_release(failed_, 1);
    store_release(launched_, round_);
    throw;
  }
  return true;
}

}  // namespace pycoll
