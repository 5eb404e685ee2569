// NumPy's arrays that come again and again get memory that the peers reach without a copy, unseen
// (decision 0023): buffers of a training loop, parameters.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "bindings/arguments/array.h"
#include "comm/communicator.h"

namespace pycoll {

/// Counts how often an array of NumPy's own memory is passed, and has the core register those that
/// were passed often enough. The GIL is held in every method.
class RegistrationCache {
 public:
  /// Raises UsageError when PYCOLL_REGISTER_AFTER cannot be read.
  RegistrationCache();

  /// Uses of an array before it is registered; 0: never.
  int after() const { return after_; }
  void set_after(int after) { after_ = after; }

  /// Whether arrays of a message of so many bytes are to be noted.
  bool wants(int64_t message_bytes) const { return message_bytes >= kMinMessage && after_ != 0; }
  /// Called when an operation is about to begin: its arrays are its alone.
  void note(Communicator& comm, const ArrayView& view) {
    if (view.nbytes() >= kMinBytes && view.numpy() != nullptr) count(comm, view);
  }

 private:
  // Below, moving arrays does not pay before they have been passed hundreds of times.
  static constexpr int64_t kMinMessage = 64 << 10;
  static constexpr int64_t kMinBytes = 16 << 10;  // what peers would reach without a copy
  static constexpr size_t kNumSeen = 256;

  /// What was passed, by addresses alone until it is registered: a new array at an old one's place
  /// may be taken for it, and is registered too early then. Each time that this was of no use, it
  /// takes twice as many uses to the next time.
  struct Seen {
    const PyObject* owner = nullptr;
    const void* data = nullptr;
    int64_t nbytes = 0;
    int64_t num_uses = 0;
    int64_t wanted = 0;                // uses
    std::weak_ptr<CachedArray> array;  // once there were so many; lives as long as its owner
    uint64_t last_use = 0;             // by now_
  };

  void count(Communicator& comm, const ArrayView& view);
  Seen& find(const PyObject* owner, const ArrayView& view);

  int after_;
  std::array<Seen, kNumSeen> seen_;
  uint64_t now_ = 0;  // counts uses, so that of two places the older one is given up
};

}  // namespace pycoll
