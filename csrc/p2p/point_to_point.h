// Sends and receives between two ranks of a communicator: who waits for them, and what ends a wait.
//
// They are apart from the collectives: another sequence, other memory. A blocking call runs on the
// caller's thread. Asynchronous ones are moved on by every thread that waits for a message, and by
// a thread of their own while nobody does. The lock is held while messages are moved, never while
// waiting; before the first asynchronous operation there is nobody to lock out.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "executor/wait/wait.h"
#include "p2p/message_engine.h"
#include "p2p/message_thread.h"

namespace pycoll {

class PointToPoint {
 public:
  /// `interrupted`: as Waiter's. `on_failure`: called before an error is raised, on its thread.
  PointToPoint(Transport& transport, PeerMemory& peer_memory, double timeout_s,
               std::function<bool()> interrupted, std::function<void()> on_failure);
  ~PointToPoint() { close(); }

  /// Of what begins from now on. Any thread.
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }

  /// Runs the operation. Raises what ended it; the communicator is broken then.
  void run(MessageOp& op, const OnSlow& on_slow);
  /// Starts it; `op` keeps its arrays.
  void start(const std::shared_ptr<MessageOp>& op);
  /// Waits at most `timeout_s`; false when it is still going on then. Raises what ended it.
  bool wait(MessageOp& op, double timeout_s);
  /// True when it is over, well or not.
  bool test(MessageOp& op);

  /// Starts all before anything is waited for. `alone`: they go on while this thread does something
  /// else than wait for them.
  void post_all(const std::vector<std::shared_ptr<MessageOp>>& ops, bool alone);
  void wait_for_all(const std::vector<std::shared_ptr<MessageOp>>& ops, const OnSlow& on_slow);

  /// Ends what is pending, if anything is, by breaking the communicator.
  void abandon();
  /// The same, and forever.
  void close();
  /// True while some thread waits for a message.
  bool is_waiting() const { return num_waiting_ != 0; }
  /// True for what an asynchronous message that ends calls.
  bool is_own_thread() const { return thread_.is_this_thread(); }

 private:
  static constexpr int64_t kLookPeriodNs = 500'000;

  class Lock;
  class Waiting;

  bool step(MessageOp& op);
  bool look_for_trouble();
  bool find_failure(MessageOp& op, int64_t now, const std::vector<Failure>& ends,
                    Failure* failure) const;
  std::vector<Failure> find_ended_peers();
  MessageThread::Progress progress_alone();
  void end_all();
  void fail_aborted();
  void finalize(std::vector<std::shared_ptr<MessageOp>> finished);
  void check_unbroken(const MessageOp& op) const;
  [[noreturn]] void raise(const std::exception_ptr& error) const;
  std::exception_ptr error_of(const MessageOp& op) const;
  void raise_timeout(const MessageOp& op, const Failure& failure) const;
  void wait_until_over(Waiter& waiter, MessageOp& op, int64_t end_ns);

  Transport& transport_;
  Segment& segment_;
  int rank_;
  std::atomic<double> timeout_s_;
  std::function<void()> on_failure_;  // before an error is raised
  Waiter run_waiter_;
  std::mutex wait_mutex_;  // of wait_waiter_: a Work may be waited for on any thread
  Waiter wait_waiter_;
  std::mutex mutex_;  // of engine_, once there is a thread
  MessageEngine engine_;
  std::atomic<bool> has_thread_{false};
  std::atomic<int> num_waiting_{0};  // threads in a wait: they move everything on
  std::atomic<bool> closed_{false};
  int64_t next_look_ns_ = 0;  // of the thread
  MessageThread thread_;      // last: it uses the others
};

}  // namespace pycoll
