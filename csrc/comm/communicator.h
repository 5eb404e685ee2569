// A communicator: the ranks that take part, their transport, and the plans for what they do.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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
class HostStaging;

class Communicator {
 public:
  /// `inputs`: of selection, alike on all ranks; null: those that the transport's maker shared.
  /// Raises UsageError, on all ranks, when its rules cannot be read.
  Communicator(std::unique_ptr<Transport> transport, double timeout_s,
               std::shared_ptr<const SelectionInputs> inputs = nullptr);
  ~Communicator();  // as close()
  /// Destroys it, on any thread: also on one of its own, where a garbage collector may find itself.
  static void retire(std::unique_ptr<Communicator> comm);

  int rank() const { return rank_; }
  int size() const { return num_ranks_; }
  /// Place of this rank among those of its host.
  int host_rank() const { return host_rank_; }
  /// Of this rank's host: hosts are numbered by their first ranks.
  int host_number() const { return host_number_; }
  double timeout_s() const { return timeout_s_; }
  /// Of what begins from now on. Any thread.
  void set_timeout_s(double timeout_s);
  std::string_view transport_name() const { return transport_->name(); }
  bool closed() const { return closed_; }
  /// Raises UsageError when it is closed.
  void check_open() const {
    if (closed_) [[unlikely]]
      raise_closed();
  }

  /// Runs the operation on the caller's thread, after any that are queued.
  /// Raises the typed error that ended it; the communicator is broken then.
  void run(const Call& call);
  /// Queues the operation. `keep_alive` is let go when it is over.
  std::shared_ptr<Work> start(const Call& call, std::shared_ptr<void> keep_alive);
  /// The same of arrays of a device: beside the call's stream, behind what that has got.
  std::shared_ptr<DeviceWork> start_on_device(const Call& call, std::shared_ptr<void> keep_alive);
  /// Runs operations on the stream that their calls name, all the same one, in their order. Returns
  /// when the device has them; null when the stream is captured. Raises as run().
  std::shared_ptr<DeviceWork> give_to_device(std::span<const Call> calls);
  /// Memory of a device that peers' kernels reach, zeroed. Collective; raises as run().
  std::shared_ptr<DeviceMemory> allocate_on_device(int device, size_t nbytes);
  /// Lets peers' kernels reach an array of a device, where the system can do that; `keep_alive` is
  /// held until it is unregistered, or the communicator closes. Collective; raises as run().
  void register_on_device(int device, std::byte* data, size_t nbytes,
                          std::shared_ptr<void> keep_alive);
  /// On all ranks alike, when all that uses it is over. False when it was not registered.
  bool unregister_on_device(const std::byte* data);
  /// Waits until all operations on a device are over. Raises what ended one.
  void synchronize();
  /// Queues a function that runs operations of this communicator, and raises nothing; and one that
  /// is called when these are over, and may let others close it.
  void enqueue(std::function<void()> operations, std::function<void()> then);
  /// True for what a queued operation calls: it may run operations, and must not wait for queued
  /// ones.
  bool is_progress_thread() const { return progress_ != nullptr && progress_->is_this_thread(); }
  void barrier();

  /// Sends and receives. The communicator is open.
  PointToPoint& messages() {
    if (messages_ == nullptr || closed_) open_messages();
    return *messages_;
  }

  /// Those of an operation that was started: also after close().
  PointToPoint& opened_messages() { return *messages_; }

  /// Memory that peers reach without a copy, zeroed. Not collective.
  SharedMemory allocate(size_t nbytes) {
    check_open();
    return {*transport_, nbytes};
  }
  /// Lets peers reach an array of the caller without a copy; `keep_alive` is held until the array
  /// is unregistered, or the communicator closes. Not collective. Nothing happens where there is no
  /// shared heap, or for what lies in it. Raises UsageError for memory that cannot move, or that
  /// overlaps another registered array in part.
  void register_array(std::byte* data, size_t nbytes, std::shared_ptr<void> keep_alive);
  /// Once for each time it was registered; after what is queued. False when it was not.
  bool unregister_array(std::byte* data);
  /// Lets peers reach an array that its owner watches, from the next operation on; without a word
  /// where that is not possible. After what is queued, and not waited for. Not collective.
  void cache_array(std::shared_ptr<CachedArray> array);
  /// Whether peers reach this memory without a copy already, or never will.
  bool reaches(const void* data, size_t nbytes) const {
    SharedHeap* const heap = transport_->heap().get();
    return heap == nullptr || heap->contains(data, nbytes) ||
           heap->registered().find(data, nbytes) != nullptr;
  }

  /// The ranks with this rank's color, ordered by key, then rank. Collective. Null when color < 0.
  /// `interrupt` lets a signal into the wait for the other members.
  std::unique_ptr<Communicator> split(int color, int key, Deadline::Interrupt interrupt = nullptr);

  /// Ends what is going on, on all ranks, with AbortedError, and breaks the communicator. Any
  /// thread.
  void abort() { fail_aborted(); }
  /// Leaves: peers that still wait for this rank are told. Never waits for a peer. Gives memory and
  /// descriptors back, at once if no other thread is within an operation. Any thread.
  void close();
  /// In a process forked off this rank's: closes without a word to the peers, for whom the rank is
  /// still there.
  void disown();

  /// Makes an algorithm written elsewhere known under its name. Proved when first used.
  void add_schedule(const Schedule& schedule);
  bool knows_algorithm(Collective collective, std::string_view name, int root) const {
    return planner_.knows(collective, name, root);
  }
  /// Where algorithms that PYCOLL_ALGO names, and that are not built in, come from. It is called
  /// within an operation, on the thread that runs it.
  void set_algorithm_source(AlgorithmSource source) {
    algorithm_source_ = std::move(source);
    planner_.set_algorithm_source(algorithm_source_);
  }
  /// Which algorithm, protocol and transport messages in such arrays get, at which predicted and
  /// measured time, and why.
  std::string explain(Collective collective, int64_t nbytes, int root, Arrays arrays);
  /// The same for arrays of this rank's device. Raises UsageError before the first call on one.
  std::string explain_on_device(Collective collective, int64_t nbytes, int root, Arrays arrays);

  /// What the ranks share. Both raise UsageError when close() has given that back.
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
  /// Called about every 20 ms of a slow wait of run(); true ends it (Ctrl-C).
  void set_interrupted(std::function<bool()> f) { waiter_.interrupted = std::move(f); }

 private:
  void execute(const Call& call);
  void perform(const Call& call, const OnSlow& on_slow);
  /// Raises UsageError for what cannot be reduced, before a rank says anything to the others.
  static void check_reduction(const Call& call);
  void agree_on_counts(const Call& call, const OnSlow& on_slow);
  int64_t message_bytes(const Call& call) const;
  void wait_interruptibly(const Work& work);
  void fail_aborted();
  bool is_own_thread() const;
  void give_back();
  [[noreturn]] void raise_failure();
  [[noreturn]] static void raise_closed();
  void open_messages();
  void open_device(const Call& call);
  AllGather host_gather(const Call& call);
  bool share_on_device(std::byte* data, size_t nbytes, const std::shared_ptr<void>& keep_alive);
  void execute_on_device(const Call& call, const OnSlow& on_slow);
  std::shared_ptr<DeviceWork> device_work(DeviceStream stream, std::shared_ptr<void> keep_alive);
  PlannedCall& choose_on_device(const CallPlan& plan, Call& call);
  void check_device_failure();
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

  std::unique_ptr<Transport> transport_;
  Segment& segment_;
  int rank_;
  int num_ranks_;
  Proxy* const proxy_;  // null: all ranks are on one host
  std::atomic<double> timeout_s_;
  std::shared_ptr<const SelectionInputs> inputs_;  // shared with all that split from this one
  Planner planner_;
  PeerMemory peer_memory_;
  Waiter waiter_;
  Recorder recorder_;
  Runner runner_;
  NormalizedCall plain_call_;
  uint64_t sequence_ = 0;
  int num_splits_ = 0;
  std::atomic<bool> closed_ = false;
  bool closed_by_own_thread_ = false;  // which nobody has joined yet
  bool is_disowned_ = false;
  std::atomic<bool> released_ = false;  // closed, and the memory is gone
  std::mutex run_mutex_;                // one operation at a time
  std::unique_ptr<ProgressThread> progress_;
  std::unique_ptr<PointToPoint> messages_;  // once there are any
  std::vector<std::byte*> registered_;      // one for each register_array()
  AlgorithmSource algorithm_source_;
  // From the first call on a device on: one of them.
  std::unique_ptr<DeviceRunner> device_;
  std::unique_ptr<HostStaging> staging_;                   // of ranks on several hosts
  std::vector<std::shared_ptr<DeviceWork>> device_works_;  // that may still run
  const int host_rank_;
  const int host_number_;
};

}  // namespace pycoll
