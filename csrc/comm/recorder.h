// Writes down what this rank does: one record per operation, in the memory that all ranks share.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "comm/call_plan.h"
#include "transport/ring/segment.h"

namespace pycoll {

struct Call;

class Recorder {
 public:
  Recorder(const Segment& segment, int rank);

  /// The record of a call that is about to begin. Nobody sees it before publish().
  const CallRecord& prepare(const Call& call, uint64_t sequence, PlannedCall& planned);
  void publish() const { segment_.publish(rank_, current_); }
  /// What runs instead of what was chosen, now that the ranks know each other's arrays.
  void runs(PlannedCall& planned) {
    if (planned.name_id == 0) name_plan(planned);
    current_.chosen = planned.name_id;
    ring_.rewrite_chosen(current_);
  }
  /// The operation is over.
  void finish() {
    ring_.finish(current_.sequence, read_ticks(steady_counter_));
    // The ring is larger than L1: the next record's lines must not hold up the next message.
    ring_.warm(current_.sequence + 1);
  }
  /// The operation ended with an error, which is about to be raised.
  void fail();
  /// The same for an earlier one, which went on after its call.
  void fail(uint64_t sequence);
  /// The same for one that nobody has seen yet, since an earlier one broke the communicator, and
  /// for a message. Any thread.
  void refuse();
  /// A rank that may leave an operation before others have entered it compares its call with those
  /// of the ranks that have (Waiter::peers_agree). True for such a rank.
  static bool may_leave_early(const Call& call, int rank, int num_ranks);

  const CallRecord& current() const { return current_; }

  /// The id of a name in this rank's table; 0 when the table is full. Any thread.
  uint16_t name_id(std::string_view text);

  /// Called once, after the first operation that failed was recorded, on its thread.
  void set_on_failure(std::function<void()> f) { on_failure_ = std::move(f); }

 private:
  void name_plan(PlannedCall& planned);

  const Segment& segment_;
  const RecordRing ring_;
  const NameTable names_;
  const int rank_;
  const bool steady_counter_;
  CallRecord current_;
  std::string last_asked_;  // most calls ask for what the last one asked for
  uint16_t last_asked_id_ = 0;
  uint32_t last_asked_hash_ = 0;
  std::mutex mutex_;  // of the three below
  std::function<void()> on_failure_;
  std::unordered_map<std::string, uint16_t> ids_;
  uint16_t num_names_ = 0;
};

}  // namespace pycoll
