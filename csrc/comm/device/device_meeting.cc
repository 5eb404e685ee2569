#include "comm/device/device_meeting.h"

#include <algorithm>

#include "base/error.h"

namespace pycoll {
namespace {

// A launch, and the addresses of an input and an output.
constexpr size_t kMemberBytes = sizeof(DeviceLaunch) + 2 * sizeof(std::byte*);

}  // namespace

DeviceMeeting::DeviceMeeting(const Device& device, std::vector<int> members)
    : device_(device),
      stream_(device),
      over_(device),
      launches_(device, members.size() * kMemberBytes) {
  for (const int rank : members) members_.push_back(Member{rank, StreamEvent(device), {}});
  for (size_t i = 0; i < kNumSources; ++i) {
    sources_.push_back(Source{PinnedMemory(device, launches_.nbytes()), StreamEvent(device)});
  }
}

bool DeviceMeeting::launch(int rank, const DeviceLaunch& launch, DeviceStream stream,
                           Waiter& waiter) {
  uint64_t round = 0;
  int missing = rank;
  {
    const std::lock_guard lock(mutex_);
    const auto self = std::find_if(members_.begin(), members_.end(),
                                   [rank](const Member& member) { return member.rank == rank; });
    self->launch = launch;
    self->stream = stream;
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
  // Event and stream change only after all members have arrived for the next operation.
  if (stream != launched_on_) over_.hold(stream);
  return true;
}

bool DeviceMeeting::launch_all(Waiter& waiter) {
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].launch.digest != members_[0].launch.digest) {
      return waiter.mismatch(members_[i].rank == waiter.rank() ? members_[0].rank
                                                               : members_[i].rank);
    }
  }
  const bool one_stream =
      std::all_of(members_.begin(), members_.end(),
                  [this](const Member& member) { return member.stream == members_[0].stream; });
  try {
    launched_on_ = one_stream ? members_[0].stream : stream_.get();
    for (Member& member : members_) {
      if (one_stream) break;
      member.ready.record(member.stream);
      member.ready.hold(launched_on_);
    }
    queue(launched_on_);
    if (!one_stream) over_.record(launched_on_);
  } catch (const CudaError&) {
    store_release(failed_, 1);
    store_release(launched_, round_);
    throw;
  }
  return true;
}

void DeviceMeeting::queue(DeviceStream stream) {
  Source& source = sources_[round_ % kNumSources];
  if (source.is_used) source.copied.synchronize();  // over, unless the device is rounds behind
  const size_t n = members_.size();
  auto* const launches = reinterpret_cast<DeviceLaunch*>(source.memory.data());
  auto* const inputs = reinterpret_cast<std::byte**>(launches + n);
  auto* const outputs = inputs + n;
  const auto on_device = [&](std::byte** table) {
    return reinterpret_cast<std::byte* const*>(
        launches_.data() + (reinterpret_cast<std::byte*>(table) - source.memory.data()));
  };
  for (size_t i = 0; i < n; ++i) {
    launches[i] = members_[i].launch;
    inputs[i] = launches[i].buffers[static_cast<int>(BufferKind::kInput)];
    outputs[i] = launches[i].buffers[static_cast<int>(BufferKind::kOutput)];
    if (launches[i].protocol == DeviceProtocol::kDirect && launches[i].peer_inputs == nullptr) {
      launches[i].peer_inputs = on_device(inputs);
      launches[i].peer_outputs = on_device(outputs);
    }
  }
  device_.copy(launches_.data(), source.memory.data(), launches_.nbytes(), stream);
  source.copied.record(stream);
  source.is_used = true;
  device_.check(
      device_.table().launch_together(device_.index(), launches,
                                      reinterpret_cast<const DeviceLaunch*>(launches_.data()),
                                      static_cast<int32_t>(n), stream),
      "the common launch of this device's ranks");
}

}  // namespace pycoll
