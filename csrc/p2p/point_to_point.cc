#include "p2p/point_to_point.h"

#include <sched.h>

#include <algorithm>
#include <string>

#include "base/ending.h"
#include "base/error.h"
#include "base/thread.h"
#include "executor/wait/describe.h"

namespace pycoll {

/// The engine's lock. Until has_thread_ is set, one thread uses the engine, and a mutex would cost
/// it 10 ns per message: it only says when it is inside. Operations that ended under the lock are
/// finalized after unlocking, because releasing their arrays may need the GIL, whose holder may
/// wait for this lock.
class PointToPoint::Lock {
 public:
  explicit Lock(PointToPoint& owner) : owner_(owner), locks_(!owner.enter_alone()) {
    if (locks_) owner_.mutex_.lock();
  }
  ~Lock() {
    std::vector<std::shared_ptr<MessageOp>> finished;
    if (owner_.engine_.has_finished()) finished = owner_.engine_.take_finished();
    if (locks_) {
      owner_.mutex_.unlock();
    } else {
      store_release(owner_.is_inside_, 0);
    }
    if (!finished.empty()) owner_.finalize(std::move(finished));
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  PointToPoint& owner_;
  bool locks_;
};

class PointToPoint::Waiting {
 public:
  explicit Waiting(PointToPoint& owner) : owner_(owner) { ++owner_.num_waiting_; }
  ~Waiting() { --owner_.num_waiting_; }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  PointToPoint& owner_;
};

PointToPoint::PointToPoint(Transport& transport, PeerMemory& peer_memory, bool checks_data,
                           double timeout_s, std::function<bool()> interrupted,
                           std::function<void()> on_failure)
    : transport_(transport),
      segment_(transport.segment()),
      rank_(transport.rank()),
      timeout_s_(timeout_s),
      on_failure_(std::move(on_failure)),
      run_waiter_(transport),
      wait_waiter_(transport),
      engine_(transport, peer_memory, checks_data),
      thread_(
          segment_, rank_, [this] { return progress_alone(); },
          [this](const std::string& text) { revoke(text); }) {
  run_waiter_.interrupted = std::move(interrupted);
}

void PointToPoint::check_unbroken(const MessageOp& op) const {
  if (load_acquire(segment_.failure_word()) != 0) raise(error_of(op));
}

void PointToPoint::raise(const std::exception_ptr& error) const {
  on_failure_();
  std::rethrow_exception(error);
}

/// True if this thread may use the engine without the mutex; is_inside_ then says that it does.
bool PointToPoint::enter_alone() {
  if (has_thread_) return false;
  store_unfenced(is_inside_, 1);
  if (!has_thread_) return true;
  store_release(is_inside_, 0);
  return false;
}

/// From here on the engine has a mutex. Another thread may be inside a blocking call.
void PointToPoint::share() {
  if (has_thread_) return;
  const std::lock_guard lock(mutex_);
  has_thread_ = true;
  // A thread that has not seen has_thread_ has said before that it is inside.
  fence_other_threads();
  while (load_acquire(is_inside_) != 0) ::sched_yield();
}

void PointToPoint::run(MessageOp& op, const OnSlow& on_slow) {
  check_unbroken(op);
  {
    const Lock lock(*this);
    engine_.post(&op);
    if (op.is_over() && engine_.has_told_all()) return;
  }
  run_waiter_.begin(0, 0, timeout_s_, on_slow);
  wait_until_over(run_waiter_, op, INT64_MAX);
  if (op.error) raise(op.error);
}

void PointToPoint::start(const std::shared_ptr<MessageOp>& op) {
  check_unbroken(*op);
  op->blocking = false;
  op->self = op;
  share();
  bool over;
  {
    const Lock lock(*this);
    engine_.post(op.get());
    over = op->state == MessageOp::State::kOver && engine_.has_told_all();
  }
  if (over) return;
  try {
    thread_.wake();
  } catch (const SystemError& error) {  // the message is posted, and has no thread to move it
    revoke(error.what());
    throw;
  }
}

void PointToPoint::post_all(const std::vector<std::shared_ptr<MessageOp>>& ops, bool alone) {
  for (const std::shared_ptr<MessageOp>& op : ops) {
    check_unbroken(*op);
    if (alone) {
      start(op);
    } else {
      const Lock lock(*this);
      engine_.post(op.get());
    }
  }
}

void PointToPoint::wait_for_all(const std::vector<std::shared_ptr<MessageOp>>& ops,
                                const OnSlow& on_slow) {
  run_waiter_.begin(0, 0, timeout_s_, on_slow);
  for (const std::shared_ptr<MessageOp>& op : ops) {
    wait_until_over(run_waiter_, *op, INT64_MAX);
    if (op->error) raise(op->error);
  }
}

bool PointToPoint::wait(MessageOp& op, double timeout_s) {
  if (!op.is_over()) {
    const int64_t end_ns = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
    const std::unique_lock lock(wait_mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      wait_waiter_.begin(0, 0, timeout_s_, {});
      wait_until_over(wait_waiter_, op, end_ns);
    } else {
      while (!test(op) && now_ns() < end_ns) ::sched_yield();
    }
  }
  if (!op.is_over()) return false;
  if (op.error) raise(op.error);
  return true;
}

bool PointToPoint::test(MessageOp& op) {
  if (op.is_over()) return true;
  step(op);
  if (load_acquire(segment_.failure_word()) != 0) end_all();
  return op.is_over();
}

/// Waits until the operation is over, successfully or not, or until `end_ns`.
void PointToPoint::wait_until_over(Waiter& waiter, MessageOp& op, int64_t end_ns) {
  const Waiting waiting(*this);
  const auto look = [this, end_ns] { return now_ns() >= end_ns || look_for_trouble(); };
  using Look = decltype(look);
  const WaitSite site{.peer = op.peer,
                      .look = [](const void* f) { return (*static_cast<const Look*>(f))(); },
                      .look_context = &look};
  const auto ready = [this, &op] { return step(op); };
  if (waiter.spin_until(ready, site)) return;
  if (load_acquire(segment_.failure_word()) != 0) end_all();
}

bool PointToPoint::step(MessageOp& op) {
  const Lock lock(*this);
  engine_.progress(op.peer);
  // The awaited rank may itself wait in a send to this rank: without this, both would wait forever.
  if (op.peer != kAnySource) engine_.buffer_announced(op.peer);
  return op.is_over() && engine_.has_told_all();
}

MessageThread::Progress PointToPoint::progress_alone() {
  using enum MessageThread::Progress;
  bool moved;
  {
    const Lock lock(*this);
    if (!engine_.has_pending()) return kIdle;
    if (num_waiting_ != 0) return kNotNeeded;  // the waiting threads progress all messages
    engine_.progress(kAnySource);
    moved = engine_.has_finished();
  }
  if (moved) return kMoved;
  const int64_t now = now_ns();
  if (now >= next_look_ns_) {
    next_look_ns_ = now + kLookPeriodNs;
    if (look_for_trouble()) end_all();
  }
  return kPending;
}

void PointToPoint::finalize(std::vector<std::shared_ptr<MessageOp>> finished) {
  for (const std::shared_ptr<MessageOp>& op : finished) {
    op->keep_alive.reset();
    store_release(op->over, 1);
  }
}

// Ends of a wait.

std::vector<Failure> PointToPoint::find_ended_peers() {
  const auto num_ranks = static_cast<size_t>(segment_.num_ranks());
  std::vector<bool> is_awaited(num_ranks, false);
  {
    const Lock lock(*this);
    engine_.for_each_pending([&is_awaited](const MessageOp& op) {
      if (op.peer == kAnySource) {
        is_awaited.assign(is_awaited.size(), true);
      } else {
        is_awaited[static_cast<size_t>(op.peer)] = true;
      }
    });
  }
  std::vector<Failure> ends(num_ranks);
  bool has_left = false;
  Look look = Look::kEarly;  // at the first one, which in most waits is the only one
  const auto look_at = [&](size_t index) {
    const auto peer = static_cast<int>(index);
    Failure& end = ends[index];
    end.reporter = static_cast<uint16_t>(rank_);
    end.culprit = static_cast<uint16_t>(peer);
    if (transport_.has_left(peer)) {
      end.code = FailureCode::kPeerLeft;
      has_left = has_left || is_awaited[index];
    } else if (const auto signal = transport_.ended_by(peer, std::exchange(look, Look::kQuick))) {
      end.code = FailureCode::kPeerDied;
      end.signal = static_cast<uint8_t>(*signal);
    }
  };
  const auto look_at_all = [&](bool awaited) {
    for (size_t peer = 0; peer < num_ranks; ++peer) {
      if (static_cast<int>(peer) != rank_ && is_awaited[peer] == awaited) look_at(peer);
    }
  };
  look_at_all(/*awaited=*/true);
  if (has_left) look_at_all(/*awaited=*/false);  // for a death, which may be why that peer left
  blame_deaths(ends);
  return ends;
}

/// A peer that has left may have left because of a death that shows later: only after kEndingNs,
/// and if no rank has died, is its leaving a failure.
void PointToPoint::blame_deaths(std::vector<Failure>& ends) {
  const auto code_is = [](FailureCode code) {
    return [code](const Failure& end) { return end.code == code; };
  };
  const auto death = std::ranges::find_if(ends, code_is(FailureCode::kPeerDied));
  const bool has_left = std::ranges::any_of(ends, code_is(FailureCode::kPeerLeft));
  if (!has_left) {
    left_ns_ = 0;
    return;
  }
  const int64_t now = now_ns();
  int64_t since = 0;
  if (left_ns_.compare_exchange_strong(since, now)) since = now;
  for (Failure& end : ends) {
    if (end.code != FailureCode::kPeerLeft) continue;
    if (death != ends.end()) {
      end = *death;
    } else if (now - since < kEndingNs) {
      end.code = FailureCode::kNone;
    }
  }
}

bool PointToPoint::find_failure(MessageOp& op, int64_t now, const std::vector<Failure>& ends,
                                Failure* failure) const {
  if (op.deadline_ns == 0) op.deadline_ns = now + static_cast<int64_t>(timeout_s_ * 1e9);
  if (op.peer != kAnySource) {
    *failure = ends[static_cast<size_t>(op.peer)];
  } else {
    // The message of a rank that has died may be the one that a receive from any rank waits for, or
    // the reason why no other rank sends one. Ranks that left have sent all of theirs.
    bool died = false;
    bool all_ended = true;
    for (int peer = 0; peer < segment_.num_ranks() && !died; ++peer) {
      const Failure& end = ends[static_cast<size_t>(peer)];
      if (end.code != FailureCode::kNone) *failure = end;
      died = end.code == FailureCode::kPeerDied;
      all_ended = all_ended && (peer == rank_ || end.code != FailureCode::kNone);
    }
    if (!died && !all_ended) *failure = {};
  }
  failure->message = Failure::mark_of(op.number);
  if (failure->code != FailureCode::kNone) return true;
  if (now < op.deadline_ns) return false;
  const int culprit = op.peer == kAnySource ? rank_ : op.peer;
  *failure = {.code = FailureCode::kTimeout,
              .reporter = static_cast<uint16_t>(rank_),
              .culprit = static_cast<uint16_t>(culprit),
              .message = Failure::mark_of(op.number)};
  return true;
}

bool PointToPoint::look_for_trouble() {
  if (load_acquire(segment_.failure_word()) != 0) return true;
  const std::vector<Failure> ends = find_ended_peers();
  const Lock lock(*this);
  // Messages that a peer sent before it ended are still valid.
  engine_.progress(kAnySource);
  const int64_t now = now_ns();
  Failure failure;
  bool failed = false;
  engine_.for_each_pending(
      [&](MessageOp& op) { failed = failed || find_failure(op, now, ends, &failure); });
  if (failed) segment_.fail(failure);
  // Senders that wait for this rank may delay other ranks, among them the one that it waits for.
  if (num_waiting_ != 0) engine_.buffer_announced(kAnySource);
  return load_acquire(segment_.failure_word()) != 0;
}

void PointToPoint::end_all() {
  const Lock lock(*this);
  // Another rank in this process may be copying from an array that is about to be released. It
  // announces the copy before it checks the failure word, so this check cannot miss it.
  while (transport_.name() == "local" && engine_.is_being_taken()) ::sched_yield();
  engine_.fail_all([this](const MessageOp& op) { return error_of(op); });
}

void PointToPoint::abandon() {
  bool pending;
  {
    const Lock lock(*this);
    pending = engine_.has_pending();
  }
  if (!pending) return;
  fail_aborted();
  end_all();
}

void PointToPoint::close() {
  if (closed_.exchange(true)) return;
  bool pending = num_waiting_ != 0;
  if (has_thread_) {
    const Lock lock(*this);
    pending = pending || engine_.has_pending();
  }
  if (pending) fail_aborted();
  thread_.stop();
  if (num_waiting_ != 0) return;
  if (pending) end_all();
  engine_.device_messages().release();
}

void PointToPoint::revoke(const std::string& reason) {
  segment_.revoke(rank_, reason);
  end_all();
}

void PointToPoint::fail_aborted() {
  segment_.fail({.code = FailureCode::kAborted,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(rank_)});
}

std::exception_ptr PointToPoint::error_of(const MessageOp& op) const {
  const Failure failure = Failure::unpack(load_acquire(segment_.failure_word()));
  try {
    if (failure.code == FailureCode::kTimeout) raise_timeout(op, failure);
    run_waiter_.raise_failure(describe(op));
  } catch (...) {
    return std::current_exception();
  }
}

void PointToPoint::raise_timeout(const MessageOp& op, const Failure& failure) const {
  const std::string me = describe(op) + ": rank " + std::to_string(rank_) + " of " +
                         std::to_string(segment_.num_ranks());
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g s", timeout_s_.load());
  const bool here = failure.reporter == rank_ && op.deadline_ns != 0 && now_ns() >= op.deadline_ns;
  if (!here) {
    std::string what = describe_failed_message(segment_, failure);
    if (what.empty()) what = "rank " + std::to_string(failure.reporter);
    // The culprit of a receive from any rank is its own rank, since it waits for no particular one.
    const std::string whom = failure.culprit == failure.reporter
                                 ? ""
                                 : " waiting for rank " + std::to_string(failure.culprit);
    throw AbortedError(me + " cannot go on: " + what + " timed out" + whom +
                       "; make a new communicator");
  }
  std::string why;
  switch (op.state) {
    case MessageOp::State::kPosted:
      why = "no message with this tag has arrived";
      break;
    case MessageOp::State::kArriving:
      why = "only " + std::to_string(op.moved) + " of " + std::to_string(op.nbytes) +
            " bytes have arrived";
      break;
    case MessageOp::State::kQueued:
      why = "the peer's mailbox is full, because that rank is in no send or receive";
      break;
    default:
      why = "no receive of the peer has matched it";
  }
  throw TimeoutError(me + " waited " + seconds + ": " + why);
}

}  // namespace pycoll
