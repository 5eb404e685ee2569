// Registers NumPy arrays that are used repeatedly (parameters, buffers of a training loop), so that
// peers access them without a copy (decision 0023).
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "bindings/arguments/array.h"
#include "comm/communicator.h"

namespace pycoll {

/// Counts how often each array in NumPy's own memory is passed, and has the core register an array
/// once it has been passed often enough. The GIL is held in every method.
class RegistrationCache {
 public:
  /// Raises UsageError when PYCOLL_REGISTER_AFTER cannot be read.
  RegistrationCache();

  /// Uses of an array before it is registered; 0: never.
  int after() const { return after_; }
  void set_after(int after) { after_ = after; }

  /// Whether arrays of a message of this size are counted.
  bool wants(int64_t payload_bytes) const { return payload_bytes >= kMinPayload && after_ != 0; }
  /// Counts one use. Called just before an operation begins, while no other operation uses its
  /// arrays.
  void note(Communicator& comm, const ArrayView& view) {
    if (view.nbytes() >= kMinBytes && view.numpy() != nullptr) count(comm, view);
  }

 private:
  // Below this size, moving an array pays only after it has been passed hundreds of times.
  static constexpr int64_t kMinPayload = 64 << 10;
  static constexpr int64_t kMinBytes = 16 << 10;  // smallest part that peers access without a copy
  static constexpr size_t kNumSeen = 256;

  /// An array that was passed, known by its address alone until it is registered. A new array at
  /// the address of an old one is taken for it, and is registered too early. Each registration
  /// that was not used doubles the number of uses before the next one.
  struct Seen {
    const PyObject* owner = nullptr;
    const void* data = nullptr;
    int64_t nbytes = 0;
    int64_t num_uses = 0;
    int64_t wanted = 0;                // uses before it is registered
    std::weak_ptr<CachedArray> array;  // set when registered; lives as long as its owner
    uint64_t last_use = 0;             // by now_
  };

  void count(Communicator& comm, const ArrayView& view);
  Seen& find(const PyObject* owner, const ArrayView& view);

  int after_;
  std::array<Seen, kNumSeen> seen_;
  uint64_t now_ = 0;  // counts uses, so that the entry used less recently is replaced
};

}  // namespace pycoll
