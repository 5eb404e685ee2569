// Records the operations of this rank, one record each, in the memory that all ranks share.
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

  /// Fills in the record of a call that is about to begin. It is private until publish().
  const CallRecord& prepare(const Call& call, uint64_t sequence, PlannedCall& planned);
  void publish() const { segment_.publish(rank_, current_); }
  /// Replaces the recorded plan, once the ranks have exchanged their arrays' places.
  void runs(PlannedCall& planned) {
    if (planned.name_id == 0) name_plan(planned);
    current_.chosen = planned.name_id;
    ring_.rewrite_chosen(current_);
  }
  /// Records the end of the operation.
  void finish() {
    ring_.finish(current_.sequence, read_ticks(steady_counter_));
    // The ring is larger than L1, so this prefetches the next record's cache lines.
    ring_.warm(current_.sequence + 1);
  }
  /// Records that the current operation failed, before its error is raised.
  void fail();
  /// Records that an earlier operation failed, which continued after its call.
  void fail(uint64_t sequence);
  /// Reports a failure without changing a record: for an unpublished operation, refused because the
  /// communicator is already broken, and for a message. May be called by any thread.
  void refuse();
  /// True for a rank that may leave an operation before all peers have entered it. Such a rank
  /// compares its call with those of the ranks that have entered (Waiter::peers_agree).
  static bool may_leave_early(const Call& call, int rank, int num_ranks);

  const CallRecord& current() const { return current_; }

  /// The id of a name in this rank's table; 0 if the table is full. May be called by any thread.
  uint16_t name_id(std::string_view text);

  /// Sets a function that is called once, after the first failure is recorded, on the same thread.
  void set_on_failure(std::function<void()> f) { on_failure_ = std::move(f); }

 private:
  void name_plan(PlannedCall& planned);

  const Segment& segment_;
  const RecordRing ring_;
  const NameTable names_;
  const int rank_;
  const bool steady_counter_;
  CallRecord current_;
  std::string last_asked_;  // algorithm that the last call named; most calls repeat it
  uint16_t last_asked_id_ = 0;
  uint32_t last_asked_hash_ = 0;
  std::mutex mutex_;  // guards the three members below
  std::function<void()> on_failure_;
  std::unordered_map<std::string, uint16_t> ids_;
  uint16_t num_names_ = 0;
};

}  // namespace pycoll
