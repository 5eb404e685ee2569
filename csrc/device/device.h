// The core's interface to a device: wraps the table's functions, with exceptions, and has an owner
// class for allocations, events and streams.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/fd.h"
#include "device/device_table.h"

namespace pycoll {

/// One device of this process. A value type of two words.
class Device {
 public:
  Device() = default;
  Device(const DeviceTable& table, int index) : table_(&table), index_(index) {}

  const DeviceTable& table() const { return *table_; }
  int index() const { return index_; }
  /// "cuda:0"
  std::string title() const { return std::string(table_->name) + ":" + std::to_string(index_); }
  DeviceFacts facts() const;

  /// Raises CudaError with the library's last error unless `status` is 0.
  void check(int status, const char* what) const {
    if (status != 0) [[unlikely]]
      raise(what);
  }

  void copy(void* dst, const void* src, size_t nbytes, DeviceStream stream) const {
    check(table_->copy(index_, dst, src, nbytes, stream), "copying");
  }
  /// Copies between memory of any kind, behind no other work; returns when it is done.
  void copy_now(void* dst, const void* src, size_t nbytes) const {
    check(table_->copy_now(index_, dst, src, nbytes), "copying");
  }
  /// Queues operations on words, in their order.
  void queue_words(std::span<const DeviceWordOp> ops, DeviceStream stream) const;
  void synchronize(DeviceStream stream) const {
    check(table_->synchronize_stream(index_, stream), "waiting for a stream");
  }
  /// Number of the capture of `stream`; 0: it is not being captured.
  uint64_t capture_of(DeviceStream stream) const {
    uint64_t capture = 0;
    check(table_->capture_of(index_, stream, &capture), "querying a stream's capture");
    return capture;
  }
  /// Whether kernels of this device can access memory of device `peer`.
  bool reaches(int peer) const;

 private:
  [[noreturn]] void raise(const char* what) const;

  const DeviceTable* table_ = nullptr;
  int index_ = 0;
};

/// Zeroed memory of a device. Its destructor does not wait: the memory is freed once no operation
/// of pycoll is under way on the device, and behind the work of other libraries (last_work.h).
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const Device& device, size_t nbytes);
  DeviceMemory(DeviceMemory&& other) noexcept
      : device_(other.device_),
        data_(std::exchange(other.data_, nullptr)),
        nbytes_(other.nbytes_) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
    return *this;
  }
  ~DeviceMemory();

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t nbytes() const { return nbytes_; }
  const Device& device() const { return device_; }

 private:
  Device device_;
  void* data_ = nullptr;
  size_t nbytes_ = 0;
};

/// Zeroed CPU memory that kernels access at the same address.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(const Device& device, size_t nbytes);
  PinnedMemory(PinnedMemory&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~PinnedMemory();

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  Device device_;
  void* data_ = nullptr;
};

/// A point in a stream.
class StreamEvent {
 public:
  explicit StreamEvent(const Device& device);
  StreamEvent(StreamEvent&& other) noexcept
      : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
  StreamEvent& operator=(StreamEvent&&) = delete;
  ~StreamEvent();

  /// Records the event behind all work queued on `stream` so far.
  void record(DeviceStream stream) {
    device_.check(device_.table().record_event(device_.index(), event_, stream),
                  "recording an event");
  }
  /// Makes all later work on `stream` wait for the event.
  void hold(DeviceStream stream) const {
    device_.check(device_.table().wait_event(device_.index(), stream, event_),
                  "making a stream wait for an event");
  }
  bool is_over() const;
  void synchronize() const {
    device_.check(device_.table().synchronize_event(event_), "waiting for an event");
  }

 private:
  Device device_;
  DeviceEvent event_ = nullptr;
};

class Stream {
 public:
  explicit Stream(const Device& device);
  Stream(Stream&& other) noexcept
      : device_(other.device_), stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream();

  DeviceStream get() const { return stream_; }

 private:
  Device device_;
  DeviceStream stream_ = nullptr;
};

}  // namespace pycoll
