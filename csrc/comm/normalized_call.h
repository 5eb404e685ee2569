// What the Runner runs in place of a call whose elements or op it does not know: opaque elements
// are bytes to it, and premul is a sum of scaled inputs.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/call.h"
#include "schedule/expressions.h"

namespace pycoll {

class NormalizedCall {
 public:
  static bool is_plain(const Call& call) {
    return call.dtype != DType::kOpaque && call.op != Op::kPremul;
  }

  /// Gives memory of at least so many bytes that lives as long as the plain call.
  using Room = std::function<void*(size_t nbytes)>;

  /// A plain call with the same effect, once scale_input() has been called. It lives until the next
  /// one is prepared. `room`: where scaled inputs go on a device.
  const Call& prepare(const Call& call, int rank, int num_ranks, const Room& room = {});
  /// The first half of premul; nothing for other calls. Afterwards, so that a call that is refused
  /// in between leaves its arrays as they were.
  void scale_input(const Call& call) const;
  /// What that writes, for who does it in its place.
  void* scaled() const { return scaled_; }
  int64_t scaled_count() const { return scaled_count_; }

 private:
  void count_bytes(int num_ranks);
  void find_room(const Call& call, int rank, int num_ranks, const Room& room);

  Call plain_;
  std::vector<int64_t> block_counts_;
  std::vector<int64_t> send_counts_;
  std::vector<int64_t> recv_counts_;
  int64_t scaled_count_ = 0;
  void* scaled_ = nullptr;
  std::unique_ptr<std::byte[]> room_;  // kept, so that the next call allocates nothing
  size_t room_bytes_ = 0;
};

/// The least canonical order of reduction that gives the bits of deterministic=True for `call`: those
/// of one reduction from rank 0 on, in the type that the dtype is accumulated in, rounded once.
/// kOther: any order does, as for every call that is not deterministic.
Order order_needed(const Call& call);

}  // namespace pycoll
