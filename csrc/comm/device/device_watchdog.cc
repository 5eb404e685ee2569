#include "comm/device/device_watchdog.h"

#include <algorithm>
#include <bit>

#include "base/clock.h"

namespace pycoll {

DeviceWatchdog::DeviceWatchdog(Transport& transport, uint64_t* abort_word, DeviceReport* report,
                               StreamWaits* waits)
    : transport_(transport),
      segment_(transport.segment()),
      rank_(transport.rank()),
      abort_word_(abort_word),
      report_(report),
      waits_(waits),
      thread_(start_thread(
          "the thread that watches a device", [this] { run(); },
          [this](const std::string& text) {
            segment_.revoke(rank_, text);
            store_release(*abort_word_, 1);
          })) {}

DeviceWatchdog::~DeviceWatchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void DeviceWatchdog::disown() { thread_.detach(); }

void DeviceWatchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    lock.unlock();
    look();
    const bool ending = ends_waits();
    if (ending) pause_.once();
    lock.lock();
    if (!ending) wake_.wait_for(lock, kPeriod, [this] { return stop_; });
  }
}

void DeviceWatchdog::look() {
  const std::lock_guard lock(look_mutex_);
  const uint64_t over = waits_ == nullptr ? 0 : waits_->over();
  if (waits_ != nullptr) waits_->watch();
  if (load_acquire(segment_.failure_word()) == 0) {
    good_ = std::max(good_, over);
    look_at_waits();
  }
  look_for_report();
  if (load_acquire(segment_.failure_word()) == 0) look_for_mismatch();
  if (load_acquire(segment_.failure_word()) == 0) look_for_ended_peers();
  if (load_acquire(segment_.failure_word()) == 0) return;
  store_release(*abort_word_, 1);  // first: kernels behind the waits that end do nothing then
  end_waits();
}

void DeviceWatchdog::report(const DeviceError& error) {
  if (load_acquire(report_->error) != 0) return;
  store_release(report_->operation, first_doubtful());
  store_release(report_->error, std::bit_cast<uint64_t>(error));
}

uint64_t DeviceWatchdog::first_doubtful() const {
  const uint64_t last = waits_->operation();  // of a replay: that of the captured call
  const uint64_t oldest = last - std::min(last, uint64_t{RecordRing::kNumRecords});
  CallRecord record;
  for (uint64_t number = std::max(good_, oldest) + 1; number < last; ++number) {
    const bool found = segment_.records(rank_).read(number, &record);
    if (found && (record.flags & CallRecord::kOnDevice) != 0) return number;
  }
  return last;
}

void DeviceWatchdog::look_at_waits() {
  DeviceError found;
  if (waits_ != nullptr && waits_->look(&found)) report(found);
}

void DeviceWatchdog::end_waits() {
  if (broken_ns_ == 0) broken_ns_ = now_ns();
  if (waits_ == nullptr) return;
  DeviceError awaited;
  if (waits_->release(&awaited)) report(awaited);
  const uint64_t over = waits_->over();
  if (over != over_at_pause_) pause_ = {};  // the next operation is about to wait
  over_at_pause_ = over;
}

bool DeviceWatchdog::ends_waits() const {
  return waits_ != nullptr && broken_ns_ != 0 && now_ns() - broken_ns_ < kShortPausesNs;
}

DeviceError DeviceWatchdog::error() const {
  return std::bit_cast<DeviceError>(load_acquire(report_->error));
}

uint64_t DeviceWatchdog::failed_operation() const { return load_acquire(report_->operation); }

void DeviceWatchdog::look_for_report() {
  const DeviceError found = error();
  Failure failure;
  failure.reporter = static_cast<uint16_t>(rank_);
  failure.culprit = found.peer;
  if (found.code == DeviceFailure::kMismatch) {
    failure.code = FailureCode::kMismatch;
  } else if (found.code == DeviceFailure::kTimeout) {
    failure.code = FailureCode::kTimeout;
    // Names a rank that has not entered the operation, not a neighbour that also waits for it.
    for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
      if (load_acquire(segment_.control(rank).sequence) < failed_operation()) {
        failure.culprit = static_cast<uint16_t>(rank);
        break;
      }
    }
  } else if (found.code == DeviceFailure::kOverlap) {
    segment_.revoke(rank_, "operation #" + std::to_string(failed_operation()) +
                               " began on its device beside another one: order replays of graphs "
                               "and calls by streams or events");
    return;
  } else {
    return;
  }
  segment_.fail(failure);
}

void DeviceWatchdog::look_for_mismatch() {
  // Launches do not synchronize on the CPU, so calls are compared here.
  const uint64_t newest = newest_;
  if (newest > compared_ + RecordRing::kNumRecords) compared_ = newest - RecordRing::kNumRecords;
  while (compared_ < newest) {
    const uint64_t sequence = compared_ + 1;
    const uint32_t own = segment_.records(rank_).read_digest(sequence);
    bool all_came = true;
    for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
      if (load_acquire(segment_.control(rank).sequence) < sequence) {
        all_came = false;
        continue;
      }
      const uint32_t theirs = segment_.records(rank).read_digest(sequence);
      if (own == 0 || theirs == 0 || own == theirs) continue;  // 0: already overwritten
      segment_.fail({.code = FailureCode::kMismatch,
                     .reporter = static_cast<uint16_t>(rank_),
                     .culprit = static_cast<uint16_t>(rank)});
      return;
    }
    if (!all_came) return;
    compared_ = sequence;
  }
}

void DeviceWatchdog::look_for_ended_peers() {
  for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
    if (rank == rank_) continue;
    const RankControl& control = segment_.control(rank);
    Failure failure;
    failure.reporter = static_cast<uint16_t>(rank_);
    failure.culprit = static_cast<uint16_t>(rank);
    if (transport_.has_left(rank)) {
      // A rank waits for its own kernels before it leaves, so only later operations still need it.
      if (load_acquire(control.sequence) >= newest_) continue;
      failure.code = FailureCode::kPeerLeft;
    } else if (const std::optional<int> signal = transport_.ended_by(rank, Look::kQuick)) {
      failure.code = FailureCode::kPeerDied;
      failure.signal = static_cast<uint8_t>(*signal);
    } else {
      continue;
    }
    segment_.fail(failure);
    return;
  }
}

}  // namespace pycoll
