// Sends and receives between two ranks of a communicator: their threads, their waits and how waits
// end.
//
// They are separate from the collectives: they have their own sequence and memory. A blocking call
// runs on the caller's thread. Asynchronous operations are progressed by every thread that waits
// for a message, and by a thread of their own while no thread waits. The lock is held while
// messages progress, never while waiting; it is not needed before the first asynchronous operation.
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
  /// `checks_data`: see MessageEngine. `interrupted`: see Waiter. `on_failure`: called before an
  /// error is raised, on the same thread.
  PointToPoint(Transport& transport, PeerMemory& peer_memory, bool checks_data, double timeout_s,
               std::function<bool()> interrupted, std::function<void()> on_failure);
  ~PointToPoint() { close(); }

  /// Sets the timeout of later operations. May be called by any thread.
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }

  /// Runs the operation. Raises its error; the communicator is broken then.
  void run(MessageOp& op, const OnSlow& on_slow);
  /// Starts the operation; `op` owns its arrays.
  void start(const std::shared_ptr<MessageOp>& op);
  /// Waits at most `timeout_s`; false if the operation is not over by then. Raises its error.
  bool wait(MessageOp& op, double timeout_s);
  /// True when the operation is over, successfully or not.
  bool test(MessageOp& op);

  /// Starts all operations. `alone`: they progress also while this thread does not wait for them.
  void post_all(const std::vector<std::shared_ptr<MessageOp>>& ops, bool alone);
  void wait_for_all(const std::vector<std::shared_ptr<MessageOp>>& ops, const OnSlow& on_slow);

  /// Whether arrays of devices may be sent and received; else only copies of them in CPU memory.
  bool carries_devices() const { return engine_.carries_devices(); }
  DeviceMessages& device_messages() { return engine_.device_messages(); }

  /// Ends pending operations, if there are any, by breaking the communicator.
  void abandon();
  /// Ends pending operations like abandon(), and the message thread. Later calls do nothing.
  void close();
  /// True while some thread waits for a message.
  bool is_waiting() const { return num_waiting_ != 0; }
  /// True on the message thread: in functions that run when an asynchronous message ends.
  bool is_own_thread() const { return thread_.is_this_thread(); }

 private:
  static constexpr int64_t kLookPeriodNs = 500'000;

  class Lock;
  class Waiting;

  bool enter_alone();
  void share();
  bool step(MessageOp& op);
  bool look_for_trouble();
  bool find_failure(MessageOp& op, int64_t now, const std::vector<Failure>& ends,
                    Failure* failure) const;
  std::vector<Failure> find_ended_peers();
  void blame_deaths(std::vector<Failure>& ends);
  MessageThread::Progress progress_alone();
  void end_all();
  void fail_aborted();
  void revoke(const std::string& reason);
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
  std::mutex wait_mutex_;  // guards wait_waiter_: any thread may wait for a Work
  Waiter wait_waiter_;
  std::mutex mutex_;  // guards engine_, once has_thread_ is set
  MessageEngine engine_;
  std::atomic<bool> has_thread_{false};
  uint64_t is_inside_ = 0;           // 1: a thread uses engine_ without mutex_
  std::atomic<int> num_waiting_{0};  // waiting threads, which progress all messages
  std::atomic<bool> closed_{false};
  std::atomic<int64_t> left_ns_{0};  // when an awaited peer was first seen to have left
  int64_t next_look_ns_ = 0;         // next failure check of thread_
  MessageThread thread_;             // last, because it uses the others
};

}  // namespace pycoll
