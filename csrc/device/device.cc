#include "device/device.h"

#include <algorithm>

#include "base/error.h"
#include "device/last_work.h"

namespace pycoll {

void Device::raise(const char* what) const {
  throw CudaError(title() + ": " + what + " failed: " + table_->last_error());
}

DeviceFacts Device::facts() const {
  DeviceFacts facts{};
  check(table_->describe(index_, &facts), "reading its properties");
  return facts;
}

bool Device::reaches(int peer) const {
  int32_t can = 0;
  check(table_->reach(index_, peer, &can), "querying peer access");
  return can != 0;
}

void Device::queue_words(std::span<const DeviceWordOp> ops, DeviceStream stream) const {
  while (!ops.empty()) {
    const auto now = ops.first(std::min<size_t>(ops.size(), kMaxWordOps));
    check(table_->queue_words(index_, now.data(), static_cast<int32_t>(now.size()), stream),
          "queueing operations on words");
    ops = ops.subspan(now.size());
  }
}

DeviceMemory::DeviceMemory(const Device& device, size_t nbytes) : device_(device), nbytes_(nbytes) {
  free_dropped(device);
  const std::string what = "allocating " + std::to_string(nbytes) + " bytes";
  device_.check(device_.table().allocate(device_.index(), std::max<size_t>(nbytes, 1), &data_),
                what.c_str());
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) free_later(device_, data_);
}

PinnedMemory::PinnedMemory(const Device& device, size_t nbytes) : device_(device) {
  device_.check(device_.table().allocate_host(std::max<size_t>(nbytes, 1), &data_),
                "allocating pinned memory");
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) device_.table().free_host(data_);
}

StreamEvent::StreamEvent(const Device& device) : device_(device) {
  device_.check(device_.table().create_event(device_.index(), &event_), "creating an event");
}

StreamEvent::~StreamEvent() {
  if (event_ != nullptr) device_.table().destroy_event(event_);
}

bool StreamEvent::is_over() const {
  int32_t is_over = 0;
  device_.check(device_.table().query_event(event_, &is_over), "querying an event");
  return is_over != 0;
}

Stream::Stream(const Device& device) : device_(device) {
  device_.check(device_.table().create_stream(device_.index(), &stream_), "creating a stream");
}

Stream::~Stream() {
  if (stream_ != nullptr) device_.table().destroy_stream(stream_);
}

}  // namespace pycoll
