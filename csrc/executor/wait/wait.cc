#include "executor/wait/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "base/ending.h"
#include "base/error.h"
#include "executor/wait/describe.h"
#include "transport/proxy/proxy.h"

namespace pycoll {
namespace {

constexpr int64_t kTroublePeriodNs = 500'000;  // between two checks for trouble
constexpr int64_t kEarlyPeriodNs = 2'000'000;  // between two early looks at the awaited rank
constexpr int64_t kInterruptPeriodNs = 20'000'000;
constexpr int kMinSpins = 20;                // under a microsecond
constexpr int kCrowdedSpins = 4;             // of ranks that outnumber the cores (decision 0092)
constexpr int kMaxSpins = 500;               // about 20 us
constexpr int64_t kSwitchNs = 1'500;         // a yield that took longer was a switch
constexpr int64_t kRemoteYieldNs = 250'000;  // 256 KiB take 210 us at 10 Gbit/s
constexpr int64_t kOversleepingYieldNs = 10'000'000;  // 256 KiB take 2 ms at 1 Gbit/s
constexpr int kRanksPerWatch = 128;    // so that all of 256 ranks are seen within 100 ms
constexpr int64_t kNapNs = 1'000'000;  // upper bound of the cost of a missed wake-up

}  // namespace

Waiter::Waiter(Transport& transport)
    : transport_(transport),
      segment_(transport.segment()),
      proxy_(segment_.proxy()),
      rank_(transport.rank()) {
  const bool oversubscribed = segment_.ranks_share_cores();
  max_spins_ = oversubscribed ? kCrowdedSpins : kMaxSpins;
  // Polling memory finds nothing that comes from another host; spin_with_hosts polls both.
  if (proxy_ != nullptr) max_spins_ = 1;
  num_spins_ = max_spins_;
  yield_ns_ = oversubscribed ? 200'000 : 1'000'000;
  remote_yield_ns_ = yield_ns_;
  for (int rank = 0; proxy_ != nullptr && rank < transport.num_ranks(); ++rank) {
    // Another rank of this host may need the core. A rank that is alone there may wait, for as long
    // as a flight between hosts takes.
    const bool shares_host = rank != rank_ && !proxy_->is_remote(rank);
    if (shares_host) remote_yield_ns_ = std::min(yield_ns_, kRemoteYieldNs);
  }
}

bool Waiter::wait_slowly(bool (*ready)(void*), void* context, const WaitSite& site) {
  if (proxy_ != nullptr && spin_with_hosts(ready, context, site.peer)) return true;
  const bool is_ready = wait_in_view(ready, context, site);
  store_relaxed(segment_.control(rank_).waits_for, 0);
  return is_ready;
}

bool Waiter::wait_in_view(bool (*ready)(void*), void* context, const WaitSite& site) {
  if (!slow_) {
    // The first slow wait of an operation starts the clock; quick waits never read it.
    slow_ = true;
    asked_ns_ = 0;
    left_ns_ = 0;
    deadline_ = Deadline::after_s(timeout_s_);
    let_go();
  }
  const int64_t start = now_ns();
  int64_t next_look = start + kTroublePeriodNs;
  int64_t next_interrupt = start + kInterruptPeriodNs;
  int64_t yield_ns = yield_ns_;
  if (proxy_ != nullptr && proxy_->is_remote(site.peer)) {
    yield_ns = proxy_->ends_naps() ? remote_yield_ns_ : kOversleepingYieldNs;
  }
  for (;;) {
    if (ready(context)) return true;
    if (proxy_ != nullptr) proxy_->poll(site.peer);
    const int64_t now = now_ns();
    if (now >= next_look || load_acquire(segment_.failure_word()) != 0) {
      if (look_for_trouble(ready, context, site)) {
        // A message posted before the trouble began is still valid.
        if (ready(context)) return true;
        site_ = site;
        return false;
      }
      next_look = now + kTroublePeriodNs;
      // Not checked here: a message from any rank, and one to this same rank.
      if (site.peer >= 0 && site.peer < segment_.num_ranks() && site.peer != rank_) {
        store_relaxed(segment_.control(rank_).looked_ns, static_cast<uint64_t>(now));
        store_relaxed(segment_.control(rank_).waits_for, static_cast<uint64_t>(site.peer) + 1);
      }
    }
    if (now >= next_interrupt && interrupted) {
      if (interrupted()) {
        site_ = site;
        segment_.fail({.code = FailureCode::kAborted,
                       .reporter = static_cast<uint16_t>(rank_),
                       .culprit = static_cast<uint16_t>(rank_)});
        return false;
      }
      next_interrupt = now_ns() + kInterruptPeriodNs;
    }
    if (now - start < yield_ns) {
      yield(now);
    } else {
      nap(ready, context, site.peer);
    }
  }
}

bool Waiter::look_for_trouble(bool (*ready)(void*), void* context, const WaitSite& site) {
  if (load_acquire(segment_.failure_word()) != 0) return true;
  if (site.look != nullptr) return site.look(site.look_context);
  Failure failure;
  failure.reporter = static_cast<uint16_t>(rank_);
  // A rank that made another call may never send the expected message.
  if (!peers_agree()) return true;
  if (proxy_ != nullptr) ask_hosts(site);
  const int64_t now = now_ns();
  const Look look = now < next_early_ns_ ? Look::kQuick : Look::kEarly;
  if (look == Look::kEarly) next_early_ns_ = now + kEarlyPeriodNs;
  const bool has_left = transport_.has_left(site.peer);
  if (has_left && find_death(/*at_all=*/true, failure)) {  // which may be why that rank left
    if (ready(context)) return false;
  } else if (has_left) {
    // If it left because of a death, that process may not have ended for this rank yet.
    if (left_ns_ == 0) left_ns_ = now;
    if (now - left_ns_ < kEndingNs || ready(context)) return false;
    failure.code = FailureCode::kPeerLeft;
    failure.culprit = static_cast<uint16_t>(site.peer);
  } else if (const std::optional<int> signal = transport_.ended_by(site.peer, look)) {
    if (ready(context)) return false;
    failure.code = FailureCode::kPeerDied;
    failure.culprit = static_cast<uint16_t>(site.peer);
    failure.signal = static_cast<uint8_t>(*signal);
  } else if (find_death(deadline_.expired(), failure)) {
    if (ready(context)) return false;
  } else if (deadline_.expired()) {
    failure.code = FailureCode::kTimeout;
    // Names the rank that never entered the operation, rather than a neighbour that waits for it
    // too, or a rank that a third one delays elsewhere.
    int late = site.peer;
    for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
      if (load_acquire(segment_.control(rank).sequence) < sequence_) {
        late = rank;
        break;
      }
    }
    failure.culprit = static_cast<uint16_t>(find_culprit(late));
  } else {
    return false;
  }
  segment_.fail(failure);
  return true;
}

// The rank that this one waits for may itself wait for a rank that has ended, or may compute for a
// long time before it does.
bool Waiter::find_death(bool at_all, Failure& failure) {
  const int n = segment_.num_ranks();
  const int num_watched = at_all ? n : std::min(n, 1 + n / kRanksPerWatch);
  for (int i = 0; i < num_watched; ++i) {
    next_watched_ = (next_watched_ + 1) % n;
    const int rank = next_watched_;
    if (rank == rank_ || transport_.has_left(rank)) continue;
    const std::optional<int> signal =
        transport_.ended_by(rank, at_all ? Look::kEarly : Look::kQuick);
    if (!signal) continue;
    CallRecord record;
    const bool has_moved_on = load_acquire(segment_.control(rank).sequence) > sequence_;
    const bool is_done = has_moved_on || (segment_.records(rank).read(sequence_, &record) &&
                                          record.finished != 0 && !record.failed());
    if (is_done) continue;  // the result does not depend on it any more
    failure.code = FailureCode::kPeerDied;
    failure.culprit = static_cast<uint16_t>(rank);
    failure.signal = static_cast<uint8_t>(*signal);
    return true;
  }
  return false;
}

// A yield that returns at once found no other thread that wants this core, so spinning is free. A
// longer one let another thread run, perhaps that of the awaited peer: spin less from now on.
void Waiter::yield(int64_t now) {
  ::sched_yield();
  if (now_ns() - now < kSwitchNs) {
    num_spins_ = std::min(num_spins_ * 2, max_spins_);
  } else {
    num_spins_ = std::min(std::max(num_spins_ / 2, kMinSpins), max_spins_);
  }
}

/// Replaces the spinning phase of spin_until when ranks are on several hosts.
bool Waiter::spin_with_hosts(bool (*ready)(void*), void* context, int peer) {
  // Polling the network is a system call, which takes as long as many checks of memory. While
  // waiting for a rank of this host it rarely helps.
  constexpr int kWorth = 12;
  const bool remote = proxy_->is_remote(peer);
  const int num_spins = segment_.ranks_share_cores() ? kMinSpins : kMaxSpins;
  for (int i = 0; i < num_spins; ++i) {
    if (remote || ++num_looks_ % kWorth == 0) {
      proxy_->poll(peer);
      i += kWorth;
    }
    if (ready(context)) return true;
    cpu_pause();
  }
  return false;
}

void Waiter::ask_hosts(const WaitSite& site) {
  // First asks the rank whose credits may be late; after a while all, since any may cause the
  // delay.
  constexpr int64_t kCreditPeriodNs = 5'000'000;
  constexpr int64_t kAskPeriodNs = 50'000'000;
  const int64_t now = now_ns();
  if (asked_ns_ == 0) asked_ns_ = now;
  if (site.for_credit && proxy_->is_remote(site.peer) &&
      now - credit_asked_ns_ >= kCreditPeriodNs) {
    credit_asked_ns_ = now;
    proxy_->request_status(site.peer, sequence_);
  }
  if (now - asked_ns_ < kAskPeriodNs) return;
  asked_ns_ = now;
  proxy_->request_status(-1, sequence_);
}

void Waiter::nap(bool (*ready)(void*), void* context, int peer) {
  if (proxy_ != nullptr && proxy_->is_remote(peer)) {
    return proxy_->nap(kNapNs, ready, context);
  }
  RankControl& control = segment_.control(rank_);
  const std::atomic_ref<uint32_t> asleep(control.asleep);
  const std::atomic_ref<uint32_t> bell(control.bell);
  const uint32_t heard = bell.load(std::memory_order_acquire);
  // A counter: the rank may wait for a collective and a message at the same time.
  asleep.fetch_add(1, std::memory_order_seq_cst);
  if (!ready(context) && load_acquire(segment_.failure_word()) == 0) {
    const timespec length{0, kNapNs};
    ::syscall(SYS_futex, &control.bell, FUTEX_WAIT, heard, &length, nullptr, 0);
  }
  asleep.fetch_sub(1, std::memory_order_relaxed);
}

bool Waiter::mismatch(int peer) {
  // The error's text names the rank's call, which comes from another host: worth a wait.
  constexpr double kFetchSeconds = 1;
  if (proxy_ != nullptr && proxy_->is_remote(peer)) {
    proxy_->fetch_record(peer, sequence_, kFetchSeconds);
  }
  segment_.fail({.code = FailureCode::kMismatch,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(peer)});
  return false;
}

bool Waiter::corrupted(int peer) {
  segment_.fail({.code = FailureCode::kCorrupted,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(peer)});
  return false;
}

bool Waiter::peers_agree() {
  fence_before_look();
  for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
    if (rank == rank_) continue;
    const uint32_t digest = segment_.records(rank).read_digest(sequence_);
    if (digest != 0 && digest != digest_) return mismatch(rank);
  }
  return true;
}

// A rank that has not checked for trouble in half the timeout is stopped, even if it was waiting.
int Waiter::find_culprit(int peer) const {
  const int64_t fresh_ns = now_ns() - static_cast<int64_t>(timeout_s_ * 0.5e9);
  int last = peer;
  for (int i = 0; i < segment_.num_ranks(); ++i) {
    RankControl& control = segment_.control(last);
    const uint64_t next = load_relaxed(control.waits_for);
    if (next == 0 || static_cast<int64_t>(load_relaxed(control.looked_ns)) < fresh_ns) return last;
    last = static_cast<int>(next) - 1;
  }
  return peer;  // a cycle has no single culprit
}

std::string Waiter::describe_missing(int culprit) const {
  std::string ranks;
  int num_missing = 0;
  int last_missing = 0;
  for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
    if (load_acquire(segment_.control(rank).sequence) >= sequence_) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    ++num_missing;
    last_missing = rank;
  }
  if (num_missing == 0) {
    return "every rank has entered it, and rank " + std::to_string(culprit) + " holds it up";
  }
  if (num_missing > 1) {
    return "ranks " + ranks + " have not entered it, rank " + std::to_string(culprit) +
           " holds them up";
  }
  return "rank " + ranks + " has not entered it: " + describe_last(segment_, last_missing);
}

std::string Waiter::describe_mismatch(const Failure& failure) const {
  // The oldest difference is the mistake; a rank that did not have to wait may be far past it.
  const uint64_t newest = std::min(load_acquire(segment_.control(failure.reporter).sequence),
                                   load_acquire(segment_.control(failure.culprit).sequence));
  const uint64_t oldest =
      newest < RecordRing::kNumRecords ? 1 : newest - RecordRing::kNumRecords + 1;
  for (uint64_t sequence = oldest; sequence <= newest; ++sequence) {
    CallRecord reporters;
    CallRecord culprits;
    if (segment_.records(failure.reporter).read(sequence, &reporters) &&
        segment_.records(failure.culprit).read(sequence, &culprits) &&
        reporters.digest != culprits.digest) {
      return "as operation #" + std::to_string(sequence) + ", " +
             describe_difference(segment_, failure.reporter, reporters, failure.culprit, culprits);
    }
  }
  return "rank " + std::to_string(failure.reporter) + " and rank " +
         std::to_string(failure.culprit) + " made different calls";
}

std::string Waiter::describe_end(int rank, int signal) const {
  const std::string host = transport_.host_of(rank);
  const std::string where = host.empty() ? "" : " on host " + host;
  if (signal == Transport::kConnectionLost) return where + " ended: its connection is gone";
  if (signal == Transport::kDoesNotRead) {
    return where + " left " + std::to_string(kMaxUnsentBytes >> 20) +
           " MiB of frames unread, so its connection was closed: it is stopped, or it is hostile";
  }
  if (signal == Transport::kInvalidFrame) {
    return where +
           " sent an invalid frame, so its connection was closed: it runs another version "
           "of pycoll, its memory is damaged, or it is hostile";
  }
  if (signal == Transport::kSilent) {
    return where + " has not been heard of for " + describe_seconds(transport_.silence_s()) +
           ": its host or the network is down, or it is stopped";
  }
  if (signal == 0) return where + " ended";
  return where + " was ended by signal " + std::to_string(signal) + " (" + ::strsignal(signal) +
         ")";
}

void Waiter::raise_failure(const CallRecord& record) const {
  raise_failure(describe_operation(record), describe_call(segment_, rank_, record));
}

void Waiter::raise_failure(const std::string& what, const std::string& call) const {
  const Failure failure = Failure::unpack(load_acquire(segment_.failure_word()));
  const int n = segment_.num_ranks();
  const std::string me = what + ": rank " + std::to_string(rank_) + " of " + std::to_string(n);
  const std::string culprit = "rank " + std::to_string(failure.culprit);
  std::string message = describe_failed_message(segment_, failure);
  // The operation that failed need not be the one that raises the error.
  const bool is_own = failure.reporter == rank_;
  const bool is_other = !is_own || message.find(what) == std::string::npos;
  const std::string in_message =
      message.empty() || !is_other ? "" : ", which " + message + " needed";
  if (message.empty()) message = "rank " + std::to_string(failure.reporter);
  switch (failure.code) {
    case FailureCode::kTimeout:
      if (failure.message != 0) {
        throw AbortedError(me + " cannot go on: " + message + " timed out" +
                           (failure.culprit == failure.reporter ? "" : " waiting for " + culprit) +
                           "; make a new communicator");
      }
      if (!slow_ || failure.culprit == rank_) {
        throw AbortedError(me + " cannot go on: rank " + std::to_string(failure.reporter) +
                           " timed out waiting for " + culprit + "; make a new communicator");
      }
      throw TimeoutError(
          me + (is_own ? " waited " + describe_seconds(timeout_s_) : " stopped waiting") +
          (site_.for_credit ? " for a free slot to rank " : " for rank ") +
          std::to_string(site_.peer) + " (chunk " + std::to_string(site_.chunk) + ", step " +
          std::to_string(site_.step) + ")" + (call.empty() ? "" : " in " + call) +
          (is_own ? ""
                  : ", because rank " + std::to_string(failure.reporter) + " waited " +
                        describe_seconds(timeout_s_)) +
          "; " + describe_missing(failure.culprit));
    case FailureCode::kPeerDied: {
      const bool remote = failure.signal >= Transport::kDoesNotRead;
      throw PeerDiedError(me + " cannot go on: " + (remote ? "" : "the process of ") + culprit +
                              describe_end(failure.culprit, failure.signal) + in_message + "; " +
                              describe_last(segment_, failure.culprit),
                          failure.culprit, remote ? 0 : failure.signal);
    }
    case FailureCode::kPeerLeft:
      throw PeerDiedError(me + " cannot go on: " + culprit + " closed its communicator" +
                              in_message + "; " + describe_last(segment_, failure.culprit),
                          failure.culprit, 0);
    case FailureCode::kRevoked: {
      const std::string reason(segment_.names(failure.reporter).read(failure.message));
      throw AbortedError(me + " cannot go on: rank " + std::to_string(failure.reporter) +
                         " aborted the communicator" + (reason.empty() ? "" : ": " + reason));
    }
    case FailureCode::kMismatch:
      throw CollectiveMismatchError(me + " cannot go on: " + describe_mismatch(failure));
    case FailureCode::kMessageMismatch:
      throw CollectiveMismatchError(
          me + " cannot go on: " +
          describe_message_mismatch(segment_.message_mismatch(failure.reporter), failure.reporter));
    case FailureCode::kCorrupted:
      throw DataError(me + " cannot go on: bytes from " + culprit + " to " + message +
                      " changed on their way: their checksums differ (PYCOLL_CHECK_DATA=1). "
                      "Memory or the network is damaged, or another program writes there");
    default:
      throw AbortedError(me + " cannot go on: rank " + std::to_string(failure.reporter) +
                         " gave this communicator up (interrupted, or closed with operations "
                         "pending); make a new one");
  }
}

}  // namespace pycoll
