// The communicator's operations on device arrays.
#include <algorithm>
#include <bit>
#include <string>

#include "base/error.h"
#include "comm/communicator.h"
#include "comm/device/device_pause.h"
#include "comm/device/device_runner.h"
#include "comm/device/staging/cpu_staging.h"
#include "comm/normalized_call.h"
#include "device/device_library.h"
#include "executor/device/device_launch.h"
#include "reduce/cells.h"

namespace pycoll {

void Communicator::open_device(const Call& call) {
  if (device_ != nullptr) {
    if (device_->device().index() == call.device) return;
    throw UsageError(std::string(info(call.collective).name) + ": the array is on device " +
                     std::to_string(call.device) + ", expected " + device_->device().title() +
                     ": a communicator uses one device per rank");
  }
  if (num_ranks_ > kMaxDeviceRanks) {
    throw UsageError("device arrays need a communicator of at most " +
                     std::to_string(kMaxDeviceRanks) + " ranks, this one has " +
                     std::to_string(num_ranks_) +
                     ": copy the arrays to CPU memory, or split the communicator");
  }
  const Device device(device_table(), call.device);
  if (device.capture_of(call.stream) != 0) {
    throw UsageError(
        "the first collective on a device cannot be captured, because it makes links to the other "
        "ranks: call one before the capture");
  }
  const double timeout_s = call.timeout_s > 0 ? call.timeout_s : timeout_s_.load();
  device_ = std::make_unique<DeviceRunner>(*transport_, device, inputs_, waiter_, cpu_gather(call),
                                           Deadline::after_s(timeout_s));
  device_->planner().set_algorithm_source(algorithm_source_);
  device_warning_ = device_->warning();
  has_device_warning_ = !device_warning_.empty();
}

std::string Communicator::take_device_warning() {
  return has_device_warning_.exchange(false) ? device_warning_ : std::string();
}

AllGather Communicator::cpu_gather(const Call& call) {
  return [this, &call](const void* mine, void* all, size_t nbytes) {
    Call exchange;
    exchange.collective = Collective::kAllGather;
    exchange.input = mine;
    exchange.output = all;
    exchange.count = static_cast<int64_t>(nbytes);
    exchange.dtype = DType::kU8;
    exchange.num_dims = 1;
    exchange.shape[0] = exchange.count;
    exchange.site = call.site;
    exchange.timeout_s = call.timeout_s;
    perform(exchange, call.on_slow);
  };
}

std::string Communicator::share_on_device(std::byte* data, size_t nbytes,
                                          const std::shared_ptr<void>& keep_alive) {
  const Call plain;
  std::string why;
  std::unique_ptr<DeviceWindow> window =
      DeviceWindow::over(*transport_, device_->device(), {data, nbytes, keep_alive},
                         cpu_gather(plain), Deadline::after_s(timeout_s_), why);
  if (window == nullptr) {
    device_->arrays().note_unreached(why);
    return why;
  }
  device_->arrays().add(data, nbytes, std::move(window), keep_alive);
  return {};
}

std::shared_ptr<DeviceMemory> Communicator::allocate_on_device(int device, size_t nbytes) {
  check_open();
  Call opening;
  opening.device = device;
  std::shared_ptr<DeviceMemory> memory;
  after_queued([&] {
    if (proxy_ != nullptr) {
      open_staging(opening);
      memory = std::make_shared<DeviceMemory>(staging_->device(), nbytes);
      return;
    }
    open_device(opening);
    memory = std::make_shared<DeviceMemory>(device_->device(), nbytes);
    share_on_device(memory->data(), nbytes, memory);
  });
  return memory;
}

std::string Communicator::register_on_device(int device, std::byte* data, size_t nbytes,
                                             std::shared_ptr<void> keep_alive) {
  check_open();
  if (proxy_ != nullptr) return {};  // no use: with several hosts no peer accesses device memory
  Call opening;
  opening.device = device;
  std::string why;
  after_queued([&] {
    open_device(opening);
    why = share_on_device(data, nbytes, keep_alive);
  });
  return why;
}

bool Communicator::unregister_on_device(const std::byte* data) {
  check_open();
  if (proxy_ != nullptr) return true;
  bool found = false;
  after_queued([&] {
    if (device_ == nullptr) return;
    wait_for_last();  // a kernel may still use the addresses of the peers' arrays
    found = device_->arrays().remove(data);
  });
  return found;
}

void Communicator::execute_on_device(const Call& call, const OnSlow& on_slow) {
  if (proxy_ != nullptr) return execute_staged(call, on_slow);
  if (checksum_bytes() != 0) {
    throw UsageError(
        "PYCOLL_CHECK_DATA=1 checks arrays in host memory only: copy them there, or "
        "do not set it");
  }
  check_reduction(call);
  open_device(call);
  check_device_failure();
  if (call.send_counts != nullptr) {
    if (device_->device().capture_of(call.stream) != 0) {
      throw UsageError(
          "all_to_all with counts cannot be captured, because the CPUs compare the counts");
    }
    agree_on_counts(call, on_slow);
  }
  const NormalizedCall::Room room = [&](size_t nbytes) {
    return device_->room(device_->premul_room(), nbytes, call);
  };
  Call plain =
      NormalizedCall::is_plain(call) ? call : plain_call_.prepare(call, rank_, num_ranks_, room);
  const int64_t nbytes = payload_bytes(plain);
  // Done first, because all of this may refuse the call. A refused call gets no sequence number,
  // and the peers do not see it.
  CallPlan& plan = device_->planner().find(
      {call.collective, nbytes, call.root, call.algorithm,
       call.block_counts != nullptr || call.send_counts != nullptr, order_needed(call)});
  PlannedCall& planned = nbytes != 0 ? choose_on_device(plan, plain) : *plan.slots;
  if (nbytes != 0) device_->prepare(plain, planned);
  Call recorded = call;
  recorded.places_hash = plain.places_hash;
  const CallRecord& record = recorder_.prepare(recorded, sequence_ + 1, planned);
  const double timeout_s = call.timeout_s > 0 ? call.timeout_s : timeout_s_.load();
  waiter_.begin(record.sequence, record.digest, timeout_s, on_slow);
  if (load_acquire(segment_.failure_word()) != 0) raise_device_failure();
  recorder_.publish();
  sequence_ = record.sequence;
  device_->watchdog().launched(sequence_);
  if (nbytes != 0) {
    try {
      if (call.op == Op::kPremul) {
        device_->scale_input(call, plain_call_.scaled(), plain_call_.scaled_count());
      }
      if (!device_->launch(plain, record, timeout_s)) raise_failure();
    } catch (const CudaError& error) {
      revoke(error.what());  // the kernels of other ranks wait for this rank's
      throw;
    }
  }
  recorder_.finish();
  ++planned.num_calls;
}

PlannedCall& Communicator::choose_on_device(const CallPlan& plan, Call& call) {
  PlannedCall& planned = device_->choose(plan, call);
  const char* const why = device_->why_not(call, planned);
  if (why == nullptr) return planned;
  if (!call.algorithm.empty()) {
    throw UsageError(std::string(info(call.collective).name) + ": algorithm " +
                     std::string(call.algorithm) + ": " + why);
  }
  // A rule of PYCOLL_ALGO is ignored for calls that cannot use its protocol.
  const std::string instead = planned.plan.algorithm + "/simple";
  return *device_->planner()
              .find({call.collective, payload_bytes(call), call.root, instead,
                     call.block_counts != nullptr || call.send_counts != nullptr,
                     order_needed(call)})
              .slots;
}

std::string Communicator::explain_on_device(Collective collective, int64_t nbytes, int root,
                                            Arrays arrays) {
  if (proxy_ != nullptr) {
    return explain(collective, nbytes, root, Arrays::kPlain) +
           "\nDevice arrays: in parts of 4 MiB through pinned CPU memory.";
  }
  const std::lock_guard lock(run_mutex_);
  check_open();
  if (device_ == nullptr) {
    throw UsageError(
        "explain: device links do not exist before the first collective on a device: call one "
        "first");
  }
  PlanKey wanted;
  wanted.collective = collective;
  wanted.nbytes = nbytes;
  wanted.root = root;
  // Plain ones are accessed in place, or copied to such that are.
  if (device_->meets_all() || device_->waits_in_streams()) arrays = Arrays::kMapped;
  return device_->planner().explain(wanted, arrays, device_->describe());
}

void Communicator::check_device_failure() {
  // Reports a device error that the watchdog has not seen yet, then checks for any failure.
  if (device_->watchdog().error().code != DeviceFailure::kNone) device_->watchdog().look();
  if (load_acquire(segment_.failure_word()) != 0) raise_device_failure();
}

void Communicator::look_at_failure() {
  // An operation that is over may have ended because of a failure which the watchdog has not seen.
  if (load_acquire(segment_.failure_word()) != 0) device_->watchdog().look();
}

void Communicator::raise_device_failure() {
  device_->take_back();
  const DeviceError error = device_->watchdog().error();
  CallRecord failed;
  segment_.records(rank_).read(load_acquire(segment_.control(rank_).sequence), &failed);
  Waiter waiter(*transport_);  // not waiter_, which another thread may be using
  if (error.code != DeviceFailure::kNone) {
    segment_.records(rank_).read(device_->watchdog().failed_operation(), &failed);
    waiter.begin(failed.sequence, failed.digest, timeout_s_, {});
    waiter.waited_elsewhere({error.peer, error.step, 0, error.for_credit != 0});
    recorder_.fail(failed.sequence);
  } else {
    recorder_.refuse();
  }
  waiter.raise_failure(failed);
}

std::exception_ptr Communicator::device_error_of(uint64_t sequence) {
  look_at_failure();
  const DeviceWatchdog& watchdog = device_->watchdog();
  if (watchdog.error().code == DeviceFailure::kNone || watchdog.failed_operation() > sequence) {
    return nullptr;
  }
  try {
    device_->watchdog().look();
    raise_device_failure();
  } catch (...) {
    return std::current_exception();
  }
}

void Communicator::forget_ended_works() {
  // They end in order, except that works of several streams may overtake each other.
  while (!device_works_.empty() && device_works_.front()->done()) device_works_.pop_front();
}

std::shared_ptr<DeviceWork> Communicator::device_work(DeviceStream stream,
                                                      std::shared_ptr<void> keep_alive) {
  const bool captured = device_->device().capture_of(stream) != 0;
  if (!captured) forget_ended_works();  // a thread that captures may not query events
  // A captured operation has not run yet, and may outlive this object.
  std::function<std::exception_ptr(uint64_t)> ended_by;
  if (!captured) ended_by = [this](uint64_t sequence) { return device_error_of(sequence); };
  auto work = std::make_shared<DeviceWork>(device_->device(), sequence_, std::move(keep_alive),
                                           std::move(ended_by));
  work->over().record(stream);
  if (!captured) device_works_.push_back(work);
  return work;
}

std::shared_ptr<DeviceWork> Communicator::start_on_device(const Call& call,
                                                          std::shared_ptr<void> keep_alive) {
  check_open();
  call.on_slow();  // queued operations may need the GIL to end
  if (proxy_ != nullptr) return start_staged(call, std::move(keep_alive));
  std::shared_ptr<DeviceWork> work;
  after_queued([&] {
    open_device(call);
    Call beside = call;
    beside.stream = device_->stream_beside(call.stream);
    execute_on_device(beside, call.on_slow);
    work = device_work(beside.stream, std::move(keep_alive));
  });
  return work;
}

std::shared_ptr<DeviceWork> Communicator::give_to_device(std::span<const Call> calls) {
  check_open();
  std::shared_ptr<DeviceWork> work;
  after_queued([&] {
    for (const Call& call : calls) execute_on_device(call, call.on_slow);
    const DeviceStream stream = calls.back().stream;
    if (proxy_ != nullptr) {  // staged operations are over on return
      work = std::make_shared<DeviceWork>(staging_->device(), 0, nullptr, nullptr);
      work->over().record(stream);
      return;
    }
    if (device_->device().capture_of(stream) == 0) work = device_work(stream, nullptr);
  });
  return work;
}

void Communicator::synchronize() {
  check_open();
  if (proxy_ != nullptr) return synchronize_staged();
  const std::unique_lock lock(run_mutex_);
  if (device_ == nullptr) return;
  wait_for_last();
  look_at_failure();
  // A failure after this rank's operations is raised by the next call.
  if (device_->watchdog().error().code != DeviceFailure::kNone) check_device_failure();
}

void Communicator::wait_for_last() {
  DevicePause pause;
  while (!device_->last().is_over()) {
    pause.once();
    if (waiter_.interrupted && waiter_.interrupted()) fail_aborted();
  }
}

void Communicator::close_device() {
  const std::unique_lock lock(run_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread is within an operation
  device_->finish();
  try {
    if (load_acquire(segment_.failure_word()) != 0) device_->take_back();
  } catch (const CudaError&) {
    // The device is lost, or has no memory left.
  }
  for (const auto& work : device_works_) work->settle();
  device_works_.clear();
  device_.reset();
}

}  // namespace pycoll
