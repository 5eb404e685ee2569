// Shares the links among the messages in flight: exactly max-min fair at every instant.
//
// No message can get more unless another one with no more than it gets less. Only the messages that
// are connected to a change through links that may limit them are recomputed.
// Source: D. Bertsekas, R. Gallager, "Data Networks", 1992, section 6.5.2 (progressive filling).
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "sim/flow_system.h"

namespace pycoll {

class FairShare {
 public:
  /// Callback for `nbytes` of a message that moved between two instants.
  using Moved = std::function<void(int32_t channel, double from_s, double to_s, double nbytes)>;

  FairShare(const FlowSystem& system, Moved moved);

  /// Starts a message of `nbytes` on the channel; a channel carries one at a time.
  void start(int32_t channel, double now_s, double nbytes);
  /// Ends the channel's message.
  void finish(int32_t channel, double now_s);
  bool is_dirty() const { return !dirty_.empty(); }

  /// Recomputes the changed shares; calls visit(channel, end_s) for each message with a new end.
  template <typename Visit>
  void solve(double now_s, Visit visit) {
    for (int32_t link : dirty_) is_dirty_[static_cast<size_t>(link)] = false;
    ++stamp_;
    for (int32_t link : dirty_) {
      if (seen_link_[static_cast<size_t>(link)] == stamp_) continue;
      find_component(link);
      ++num_solved_;
      num_shared_ += static_cast<int64_t>(flows_.size());
      share(now_s);
      for (int32_t channel : flows_) {
        const double end_s =
            now_s + left_[static_cast<size_t>(channel)] / rate_[static_cast<size_t>(channel)];
        // A message whose rate stayed keeps its end, and the event made for it stays valid.
        if (!changed_[static_cast<size_t>(channel)]) continue;
        changed_[static_cast<size_t>(channel)] = false;
        visit(channel, end_s);
      }
    }
    dirty_.clear();
  }

  int64_t num_solved() const { return num_solved_; }
  /// Number of shares computed so far: a measure of the work.
  int64_t num_shared() const { return num_shared_; }

 private:
  void mark(int32_t link);
  void find_component(int32_t link);
  void share(double now_s);
  void settle(int32_t channel, double now_s);

  const FlowSystem& system_;
  Moved moved_;
  // By channel.
  std::vector<double> left_, rate_, since_s_;
  std::vector<bool> changed_;
  std::vector<int64_t> seen_flow_;
  // By link: the hops of the messages on it; by hop: its index there.
  std::vector<std::vector<int32_t>> active_;
  std::vector<int32_t> place_;
  std::vector<int32_t> channel_of_hop_;
  std::vector<bool> is_dirty_;
  std::vector<int64_t> seen_link_;
  std::vector<double> room_, weight_;
  std::vector<int32_t> dirty_;
  // The current component.
  std::vector<int32_t> links_, flows_;
  std::vector<std::pair<double, int32_t>> heap_;
  std::vector<double> before_;
  std::vector<bool> frozen_;
  int64_t stamp_ = 0;
  int64_t num_solved_ = 0;
  int64_t num_shared_ = 0;
};

}  // namespace pycoll
