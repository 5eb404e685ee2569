// Rewrites a call for the Runner, which knows neither opaque elements nor premul: opaque elements
// become bytes, and premul becomes a sum of scaled inputs.
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

  /// Returns memory of at least `nbytes` that lives as long as the plain call.
  using Room = std::function<void*(size_t nbytes)>;

  /// Returns a plain call with the same effect, once scale_input() has been called. It lives until
  /// the next prepare(). `room`: allocates the scaled inputs of a device call.
  const Call& prepare(const Call& call, int rank, int num_ranks, const Room& room = {});
  /// Scales the input of a premul call; does nothing for other calls. Separate from prepare(), so
  /// that a call refused in between does not change its arrays.
  void scale_input(const Call& call) const;
  /// Output of scale_input(), for engines that scale on the device instead.
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

/// The least strict order of reduction that gives the bits of deterministic=True for `call`: the
/// bits of one reduction in rank order, in the accumulation type of the dtype, rounded once.
/// kOther: any order is allowed, as for every call that is not deterministic.
Order order_needed(const Call& call);

}  // namespace pycoll
