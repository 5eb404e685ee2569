#include "device/last_work.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace pycoll {
namespace {

/// A place for all devices of this process.
struct Registry {
  struct Dropped {
    Device device;
    void* memory;
  };
  std::mutex mutex;
  std::vector<LastWork*> works;
  std::vector<Dropped> dropped;
};

Registry& registry() {
  static auto* const all = new Registry;  // never deleted: arrays may outlive static objects
  return *all;
}

bool same(const Device& one, const Device& other) {
  return &one.table() == &other.table() && one.index() == other.index();
}

bool any_under_way(const Registry& all, const Device& device) {
  return std::any_of(all.works.begin(), all.works.end(), [&](LastWork* work) {
    return same(work->device(), device) && !work->is_over();
  });
}

/// Takes the memory of `device` that can be freed now.
std::vector<void*> take_dropped(const Device& device) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<void*> taken;
  if (any_under_way(all, device)) return taken;
  const auto of_others =
      std::partition(all.dropped.begin(), all.dropped.end(),
                     [&](const Registry::Dropped& one) { return !same(one.device, device); });
  for (auto at = of_others; at != all.dropped.end(); ++at) taken.push_back(at->memory);
  all.dropped.erase(of_others, all.dropped.end());
  return taken;
}

void keep(const Device& device, void* memory) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.dropped.push_back({device, memory});
}

}  // namespace

LastWork::LastWork(const Device& device) : device_(device), event_(device) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.works.push_back(this);
}

LastWork::~LastWork() {
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    std::erase(all.works, this);
  }
  free_dropped(device_);
}

void LastWork::order(DeviceStream stream) {
  const std::lock_guard lock(mutex_);
  if (!any_ || stream == stream_) return;
  mark();
  event_.hold(stream);
}

void LastWork::queued(DeviceStream stream) {
  const std::lock_guard lock(mutex_);
  any_ = true;
  is_marked_ = false;
  stream_ = stream;
  // Default streams always exist. Any other one may be destroyed before the event is needed.
  if (reinterpret_cast<uintptr_t>(stream) > 2) mark();
}

bool LastWork::is_over() {
  const std::lock_guard lock(mutex_);
  if (!any_) return true;
  mark();
  return event_.is_over();
}

void LastWork::synchronize() {
  {
    const std::lock_guard lock(mutex_);
    if (!any_) return;
    mark();
  }
  event_.synchronize();
}

void LastWork::mark() {
  if (!is_marked_) event_.record(stream_);
  is_marked_ = true;
}

void free_later(const Device& device, void* memory) {
  keep(device, memory);
  free_dropped(device);
}

void free_dropped(const Device& device) {
  std::vector<void*> taken;
  try {
    taken = take_dropped(device);
  } catch (const CudaError&) {
    return;  // the device is lost, or this thread captures a stream
  }
  if (taken.empty()) return;
  // Work of other libraries may use the memory. This fails, too, while a stream is captured.
  const bool idle = device.table().synchronize_device(device.index()) == 0;
  for (void* memory : taken) {
    if (!idle || device.table().free(memory) != 0) keep(device, memory);
  }
}

}  // namespace pycoll
