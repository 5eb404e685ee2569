// A communicator: its ranks, their transport, and the plans of its operations.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/checksum.h"
#include "comm/async/progress.h"
#include "comm/call.h"
#include "comm/device/device_work.h"
#include "comm/normalized_call.h"
#include "comm/planner.h"
#include "comm/recorder.h"
#include "comm/runner.h"
#include "comm/shared_array.h"
#include "p2p/point_to_point.h"
#include "transport/memory/cached_array.h"
#include "transport/memory/descriptors.h"
#include "transport/transport.h"

namespace pycoll {

class DeviceRunner;
class CpuStaging;

class Communicator {
 public:
  /// `inputs`: inputs of selection, identical on all ranks; null: those that the transport shares.
  /// Raises UsageError on all ranks if their rules cannot be parsed.
  Communicator(std::unique_ptr<Transport> transport, double timeout_s,
               std::shared_ptr<const SelectionInputs> inputs = nullptr);
  ~Communicator();  // calls close()
  /// Destroys a communicator. May be called on any thread, also on one of the communicator's own,
  /// on which a garbage collector may run.
  static void retire(std::unique_ptr<Communicator> comm);

  int rank() const { return rank_; }
  int size() const { return num_ranks_; }
  /// Index of this rank among the ranks of its host.
  int host_rank() const { return host_rank_; }
  /// Number of this rank's host. Hosts are numbered in the order of their first ranks.
  int host_number() const { return host_number_; }
  double timeout_s() const { return timeout_s_; }
  /// Sets the timeout of later operations. May be called by any thread.
  void set_timeout_s(double timeout_s);
  std::string_view transport_name() const { return transport_->name(); }
  bool closed() const { return closed_; }
  /// Raises UsageError if the communicator is closed.
  void check_open() const {
    if (closed_) [[unlikely]]
      raise_closed();
  }

  /// Runs the operation on the caller's thread, after all queued ones. Raises its error; the
  /// communicator is broken then.
  void run(const Call& call);
  /// Queues the operation. `keep_alive` is released when it is over.
  std::shared_ptr<Work> start(const Call& call, std::shared_ptr<void> keep_alive);
  /// Starts an operation on device arrays: on a stream of its own, behind the earlier work of the
  /// call's stream.
  std::shared_ptr<DeviceWork> start_on_device(const Call& call, std::shared_ptr<void> keep_alive);
  /// Runs operations in order on the stream of their calls, which all name the same one. Returns
  /// when they are queued there; null if the stream is being captured. Raises like run().
  std::shared_ptr<DeviceWork> give_to_device(std::span<const Call> calls);
  /// Allocates zeroed device memory that peers' kernels can access. Collective; raises like run().
  std::shared_ptr<DeviceMemory> allocate_on_device(int device, size_t nbytes);
  /// Lets peers' kernels access a device array, if the system supports it. `keep_alive` is held
  /// until the array is unregistered or the communicator closes. Returns why the peers cannot
  /// access it; empty if they can. Collective; raises like run().
  std::string register_on_device(int device, std::byte* data, size_t nbytes,
                                 std::shared_ptr<void> keep_alive);
  /// Unregisters an array, once all operations on it are over. All ranks call this in the same
  /// order. False if it was not registered.
  bool unregister_on_device(const std::byte* data);
  /// What the user should know of the device, once; empty: nothing.
  std::string take_device_warning();
  /// Waits until all operations on the device are over. Raises the error of a failed one.
  void synchronize();
  /// Queues `operations`, which runs operations of this communicator and raises nothing. `then` is
  /// called when it is over, and may let another thread close the communicator.
  void enqueue(std::function<void()> operations, std::function<void()> then);
  /// True on the progress thread: functions called there may run operations, but must not wait for
  /// queued ones.
  bool is_progress_thread() const { return progress_ != nullptr && progress_->is_this_thread(); }
  void barrier();

  /// Sends and receives. Raises UsageError if the communicator is closed. May be called by any
  /// thread.
  PointToPoint& messages() {
    if (!has_messages_ || closed_) open_messages();
    return *messages_;
  }

  /// Sends and receives, for an operation that was started. Works also after close().
  PointToPoint& opened_messages() { return *messages_; }

  /// Allocates zeroed memory that peers access without a copy. Not collective.
  SharedMemory allocate(size_t nbytes) {
    check_open();
    return {*transport_, nbytes};
  }
  /// Lets peers access a caller's array without a copy. `keep_alive` is held until the array is
  /// unregistered or the communicator closes. Not collective. Does nothing if there is no shared
  /// heap, or if the array is already in it. Raises UsageError for memory that cannot be moved, or
  /// that partly overlaps another registered array.
  void register_array(std::byte* data, size_t nbytes, std::shared_ptr<void> keep_alive);
  /// Undoes one register_array(), after all queued operations. False if the array is not
  /// registered.
  bool unregister_array(std::byte* data);
  /// Lets peers access an array whose owner reports its end, from the next operation on. Runs after
  /// all queued operations, without waiting for them. Does nothing, without an error, where that is
  /// impossible. Not collective.
  void cache_array(std::shared_ptr<CachedArray> array);
  /// Whether registering this memory is pointless: peers already access it without a copy, or there
  /// is no shared heap.
  bool reaches(const void* data, size_t nbytes) const {
    SharedHeap* const heap = transport_->heap().get();
    return heap == nullptr || heap->contains(data, nbytes) ||
           heap->registered().find(data, nbytes) != nullptr;
  }

  /// Makes a communicator of the ranks with this rank's color, ordered by key, then rank.
  /// Collective. Null if color < 0. `interrupt` lets a signal end the wait for the other members.
  std::unique_ptr<Communicator> split(int color, int key, Deadline::Interrupt interrupt = nullptr);

  /// Raises PeerDiedError if one of `ranks` is a process of this host that has ended. Ranks of
  /// other hosts may live although their links are lost.
  void check_alive_here(std::span<const int> ranks, Look look = Look::kQuick) {
    check_open();
    for (const int rank : ranks) {
      if (transport_->host_number(rank) == host_number_) {
        transport_->check_alive({&rank, 1}, look);
      }
    }
  }

  /// Breaks the communicator if a rank has ended, for a caller that leaves it because of that:
  /// another rank may wait here for the caller, and not for the rank that ended.
  void announce_deaths();

  /// Ends all pending operations of all ranks with AbortedError, and breaks the communicator. May
  /// be called by any thread.
  void abort(std::string_view reason = {});
  /// Leaves the communicator; peers that still wait for this rank raise an error. Never waits for a
  /// peer. Releases memory and descriptors, immediately if no other thread is within an operation.
  /// May be called by any thread.
  void close();
  /// Closes the communicator in a forked process. The peers do not notice: for them the rank still
  /// exists.
  void disown();

  /// Adds a custom algorithm under its name. It is proved when first used.
  void add_schedule(const Schedule& schedule);
  bool knows_algorithm(Collective collective, std::string_view name, int root) const {
    return planner_.knows(collective, name, root);
  }
  /// Sets the source of algorithms that PYCOLL_ALGO names and that are not built in. It is called
  /// within an operation, on the operation's thread.
  void set_algorithm_source(AlgorithmSource source) {
    algorithm_source_ = std::move(source);
    planner_.set_algorithm_source(algorithm_source_);
  }
  /// Describes the algorithm, protocol and transport of such a call, its predicted and measured
  /// time, and the reason for the choice.
  std::string explain(Collective collective, int64_t nbytes, int root, Arrays arrays);
  /// explain() for arrays of this rank's device. Raises UsageError before the first device call.
  std::string explain_on_device(Collective collective, int64_t nbytes, int root, Arrays arrays);

  /// The memory that the ranks share. segment() and recorder() raise UsageError once close() has
  /// released it.
  const Segment& segment() const {
    if (released_) [[unlikely]]
      raise_closed();
    return segment_;
  }
  Recorder& recorder() {
    if (released_) [[unlikely]]
      raise_closed();
    return recorder_;
  }
  Ledger ledger() const { return runner_.ledger(); }
  /// Sets a function that a slow wait of run() calls about every 20 ms; true ends it (Ctrl-C).
  void set_interrupted(std::function<bool()> f) { waiter_.interrupted = std::move(f); }

 private:
  void execute(const Call& call);
  void perform(const Call& call, const OnSlow& on_slow);
  /// Raises UsageError for a dtype and op that cannot be reduced, before the peers see the call.
  static void check_reduction(const Call& call);
  void agree_on_counts(const Call& call, const OnSlow& on_slow);
  int64_t payload_bytes(const Call& call) const;
  void wait_interruptibly(const Work& work);
  void fail_aborted();
  /// As abort(), without check_open().
  void revoke(std::string_view reason);
  size_t checksum_bytes() const { return inputs_->checks_data ? kChecksumBytes : 0; }
  bool is_own_thread() const;
  void give_back();
  [[noreturn]] void raise_failure();
  [[noreturn]] static void raise_closed();
  void open_messages();
  void open_device(const Call& call);
  AllGather cpu_gather(const Call& call);
  /// Returns why the peers cannot access the array; empty if they can.
  std::string share_on_device(std::byte* data, size_t nbytes,
                              const std::shared_ptr<void>& keep_alive);
  void wait_for_last();
  void execute_on_device(const Call& call, const OnSlow& on_slow);
  void forget_ended_works();
  std::shared_ptr<DeviceWork> device_work(DeviceStream stream, std::shared_ptr<void> keep_alive);
  PlannedCall& choose_on_device(const CallPlan& plan, Call& call);
  void check_device_failure();
  void look_at_failure();
  [[noreturn]] void raise_device_failure();
  std::exception_ptr device_error_of(uint64_t sequence);
  void close_device();
  void open_staging(const Call& call);
  void wait_for_device(const StreamEvent& event);
  void execute_staged(const Call& call, const OnSlow& on_slow);
  void execute_staged(const Call& call, const StreamEvent& begun, const OnSlow& on_slow);
  void synchronize_staged();
  std::shared_ptr<DeviceWork> start_staged(const Call& call, std::shared_ptr<void> keep_alive);
  void after_queued(const std::function<void()>& action);
  /// The thread of queued operations, which the first of them starts.
  ProgressThread& progress();

  std::unique_ptr<Transport> transport_;
  Segment& segment_;
  int rank_;
  int num_ranks_;
  Proxy* const proxy_;  // null: all ranks are on one host
  std::atomic<double> timeout_s_;
  std::shared_ptr<const SelectionInputs>
      inputs_;  // shared with all communicators split from this one
  Planner planner_;
  PeerMemory peer_memory_;
  Waiter waiter_;
  Recorder recorder_;
  Runner runner_;
  NormalizedCall plain_call_;
  uint64_t sequence_ = 0;
  int num_splits_ = 0;
  std::atomic<bool> closed_ = false;
  bool closed_by_own_thread_ = false;  // that thread is not joined yet
  bool is_disowned_ = false;
  std::atomic<bool> released_ = false;  // closed, and the memory is released
  std::mutex run_mutex_;                // one operation at a time
  std::unique_ptr<ProgressThread> progress_;
  std::unique_ptr<PointToPoint> messages_;  // null until the first message
  std::atomic<bool> has_messages_{false};   // the first message has made them
  std::mutex open_messages_mutex_;
  std::vector<std::byte*> registered_;  // one for each register_array()
  AlgorithmSource algorithm_source_;
  // Set by the first device call: one of the two.
  std::unique_ptr<DeviceRunner> device_;
  std::string device_warning_;  // set at most once, before the flag
  std::atomic<bool> has_device_warning_{false};
  std::unique_ptr<CpuStaging> staging_;                   // if the ranks are on several hosts
  std::deque<std::shared_ptr<DeviceWork>> device_works_;  // which may still run
  const int host_rank_;
  const int host_number_;
};

}  // namespace pycoll
