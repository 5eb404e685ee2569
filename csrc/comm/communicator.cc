#include "comm/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/thread.h"
#include "comm/counts.h"
#include "comm/device/device_runner.h"
#include "comm/device/staging/cpu_staging.h"
#include "comm/normalized_call.h"
#include "comm/settings.h"
#include "reduce/cells.h"
#include "transport/proxy/proxy.h"

namespace pycoll {
namespace {

// One of this many calls of a plan is timed for explain().
constexpr int64_t kTimedEvery = 16;
// An all_to_all with counts is planned as if its payload had this size.
constexpr int64_t kUnevenBytes = int64_t{1} << 20;

PlannerLinks links_of(const Transport& transport, const Segment& segment, const HostLevel& hosts,
                      size_t checksum_bytes) {
  PlannerLinks links;
  links.all_mapped = transport.shares_address_space();
  links.one_host = segment.proxy() == nullptr;
  links.one_per_host = hosts.one_per_host();
  const SegmentLayout& layout = segment.layout();
  links.num_slots = layout.num_slots;
  const auto bytes = [&](ProtocolKind protocol) {
    return layout.slot_bytes[static_cast<size_t>(protocol)];
  };
  const size_t simple_bytes = std::min(bytes(ProtocolKind::kSimple), hosts.message_bytes());
  links.slot_payloads = {static_cast<int64_t>(simple_bytes - checksum_bytes),
                         LowLatency::payload_bytes<CpuTarget::LineBatch>(bytes(ProtocolKind::kLL))};
  return links;
}

Topology topology_of(Transport& transport, const SelectionInputs& inputs) {
  const int num_ranks = transport.num_ranks();
  Topology topology = shared_memory_topology(num_ranks, transport.segment().num_cores());
  std::vector<int> host_of;
  for (int rank = 0; rank < num_ranks; ++rank) host_of.push_back(transport.host_number(rank));
  if (*std::max_element(host_of.begin(), host_of.end()) != 0) {
    topology.hosts = host_level(std::move(host_of), inputs.network);
  }
  return topology;
}

Planner planner_of(Transport& transport, const std::shared_ptr<const SelectionInputs>& inputs,
                   size_t checksum_bytes) {
  Topology topology = topology_of(transport, *inputs);
  const PlannerLinks links =
      links_of(transport, transport.segment(), topology.hosts, checksum_bytes);
  return {Selector(std::move(topology), inputs), transport.rank(), links};
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport, double timeout_s,
                           std::shared_ptr<const SelectionInputs> inputs)
    : transport_(std::move(transport)),
      segment_(transport_->segment()),
      rank_(transport_->rank()),
      num_ranks_(transport_->num_ranks()),
      proxy_(segment_.proxy()),
      timeout_s_(timeout_s),
      inputs_(inputs != nullptr ? std::move(inputs)
                                : Settings::from_bytes(segment_.settings_text()).parse()),
      planner_(planner_of(*transport_, inputs_, checksum_bytes())),
      peer_memory_(*transport_),
      waiter_(*transport_),
      recorder_(segment_, rank_),
      runner_(*transport_, waiter_, peer_memory_, planner_.links(), checksum_bytes()),
      host_rank_(transport_->host_rank(rank_)),
      host_number_(transport_->host_number(rank_)) {
  check_num_ranks(num_ranks_);
  segment_.introduce(transport_->group_name());
  store_release(segment_.control(rank_).pid, static_cast<uint64_t>(::getpid()));
  store_release(segment_.control(rank_).thread_id, static_cast<uint64_t>(::gettid()));
  store_release(segment_.control(rank_).state, 1);
}

Communicator::~Communicator() {
  close();
  if (closed_by_own_thread_) give_back();
  // After fork the message thread is gone, so destroying its condition variable would block.
  if (is_disowned_) (void)messages_.release();
}

void Communicator::retire(std::unique_ptr<Communicator> comm) {
  if (comm == nullptr || !comm->is_own_thread()) return;
  Communicator* const raw = comm.release();
  try {
    start_thread("the thread that frees a communicator", [raw] { delete raw; }, {}).detach();
  } catch (const SystemError&) {
    // Without a thread its memory stays: this thread cannot join itself.
  }
}

bool Communicator::is_own_thread() const {
  return is_progress_thread() || (messages_ != nullptr && messages_->is_own_thread());
}

void Communicator::close() {
  if (closed_) return;
  closed_ = true;
  if (device_ != nullptr) close_device();
  store_release(segment_.control(rank_).state, 2);
  if (progress_ != nullptr && progress_->num_operations() != 0) fail_aborted();
  if (messages_ != nullptr) messages_->close();
  segment_.ring_all_bells();
  closed_by_own_thread_ = is_own_thread();
  if (!closed_by_own_thread_) give_back();
}

void Communicator::give_back() {
  progress_.reset();
  for (std::byte* data : registered_) transport_->heap()->registered().remove(data);
  registered_.clear();
  // If another thread is within an operation, the memory is freed with this object.
  const std::unique_lock lock(run_mutex_, std::try_to_lock);
  if (!lock.owns_lock() || (messages_ != nullptr && messages_->is_waiting())) return;
  staging_.reset();
  runner_.release();
  released_ = true;
  transport_->release();
}

void Communicator::disown() {
  closed_ = true;
  closed_by_own_thread_ = false;
  is_disowned_ = true;
  (void)progress_.release();  // its thread does not exist in this process and cannot be joined
  if (device_ != nullptr) device_.release()->disown();  // device contexts do not survive fork
  (void)staging_.release();
  transport_->disown();
}

void Communicator::raise_closed() {
  throw UsageError("this communicator is closed: make a new one with pycoll.init()");
}

void Communicator::open_messages() {
  check_open();
  const std::lock_guard lock(open_messages_mutex_);
  if (has_messages_) return;  // another thread's first message has made them
  messages_ =
      std::make_unique<PointToPoint>(*transport_, peer_memory_, inputs_->checks_data, timeout_s_,
                                     waiter_.interrupted, [this] { recorder_.refuse(); });
  has_messages_ = true;
}

void Communicator::register_array(std::byte* data, size_t nbytes,
                                  std::shared_ptr<void> keep_alive) {
  check_open();
  const std::shared_ptr<SharedHeap> heap = transport_->heap();
  if (heap == nullptr || heap->contains(data, nbytes)) return;
  after_queued([&] {
    heap->registered().add(*heap, data, nbytes, std::move(keep_alive));
    registered_.push_back(data);
  });
}

bool Communicator::unregister_array(std::byte* data) {
  check_open();
  const std::shared_ptr<SharedHeap> heap = transport_->heap();
  if (heap == nullptr || heap->contains(data, 0)) return true;
  const auto found = std::find(registered_.begin(), registered_.end(), data);
  if (found == registered_.end()) return false;
  after_queued([&] { heap->registered().remove(data); });
  registered_.erase(found);
  return true;
}

void Communicator::cache_array(std::shared_ptr<CachedArray> array) {
  const std::shared_ptr<SharedHeap> heap = transport_->heap();
  if (heap == nullptr || closed_) return;
  if (progress_ != nullptr && progress_->num_pending() != 0 && !is_progress_thread()) {
    progress_->submit_local([array = std::move(array), heap] { array->attach(heap); });
    return;
  }
  // Does not wait: an operation of another thread may need this thread before it ends.
  const std::unique_lock lock(run_mutex_, std::try_to_lock);
  if (lock.owns_lock()) array->attach(heap);
}

void Communicator::set_timeout_s(double timeout_s) {
  timeout_s_ = timeout_s;
  if (messages_ != nullptr) messages_->set_timeout_s(timeout_s);
}

void Communicator::after_queued(const std::function<void()>& action) {
  if (progress_ != nullptr && progress_->num_pending() != 0 && !is_progress_thread()) {
    const auto work = progress_->submit(action);
    wait_interruptibly(*work);
    return;
  }
  const std::lock_guard lock(run_mutex_);
  action();
}

void Communicator::run(const Call& call) {
  check_open();
  if (progress_ != nullptr && progress_->num_pending() != 0 && !is_progress_thread()) {
    call.on_slow();
    Call queued = call;
    queued.on_slow = {};
    const auto work = progress_->submit([this, &queued] { execute(queued); });
    wait_interruptibly(*work);
    return;
  }
  execute(call);
}

void Communicator::wait_interruptibly(const Work& work) {
  while (!work.wait(0.05)) {
    // The progress thread cannot see Ctrl-C. Its operation ends soon after this.
    if (waiter_.interrupted && waiter_.interrupted()) fail_aborted();
  }
}

void Communicator::abort(std::string_view reason) {
  check_open();
  revoke(reason);
}

void Communicator::announce_deaths() {
  check_open();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_ || transport_->has_left(rank)) continue;
    const std::optional<int> signal = transport_->ended_by(rank, Look::kEarly);
    if (!signal) continue;
    const Failure death{.code = FailureCode::kPeerDied,
                        .signal = static_cast<uint8_t>(*signal),
                        .reporter = static_cast<uint16_t>(rank_),
                        .culprit = static_cast<uint16_t>(rank)};
    return proxy_ == nullptr ? segment_.fail(death) : proxy_->fail(death);
  }
}

void Communicator::revoke(std::string_view reason) {
  if (proxy_ == nullptr) return segment_.revoke(rank_, reason);
  proxy_->revoke(reason);  // ranks of other hosts that compute are told, too
}

ProgressThread& Communicator::progress() {
  if (progress_ == nullptr) {
    progress_ = std::make_unique<ProgressThread>([this](const std::string& text) { revoke(text); });
  }
  return *progress_;
}

void Communicator::fail_aborted() {
  segment_.fail({.code = FailureCode::kAborted,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(rank_)});
}

void Communicator::raise_failure() {
  recorder_.fail();
  if (device_ != nullptr) device_->take_back();
  waiter_.raise_failure(recorder_.current());
}

std::shared_ptr<Work> Communicator::start(const Call& call, std::shared_ptr<void> keep_alive) {
  check_open();
  return progress().submit(
      [this, call, algorithm = std::string(call.algorithm), keep = std::move(keep_alive)] {
        Call own = call;
        own.algorithm = algorithm;
        own.on_slow = {};
        execute(own);
      });
}

void Communicator::enqueue(std::function<void()> operations, std::function<void()> then) {
  check_open();
  progress().submit(std::move(operations), std::move(then));
}

void Communicator::execute(const Call& call) {
  std::unique_lock lock(run_mutex_, std::try_to_lock);
  OnSlow on_slow = call.on_slow;
  if (!lock.owns_lock()) {
    on_slow();
    on_slow = {};
    lock.lock();
  }
  if (released_) raise_closed();  // closed since check_open()
  if (call.device >= 0) [[unlikely]]
    return execute_on_device(call, on_slow);
  check_reduction(call);
  if (call.send_counts != nullptr) agree_on_counts(call, on_slow);
  perform(call, on_slow);
}

void Communicator::check_reduction(const Call& call) {
  if (!supported(call.dtype, call.op) && info(call.collective).has_op) {
    check_op(call.dtype, call.op);
  }
  if (call.op == Op::kPremul) check_premul_factor(call.dtype, call.factor);
}

void Communicator::agree_on_counts(const Call& call, const OnSlow& on_slow) {
  const std::vector<int64_t> mine = counts_row(call.send_counts, call.recv_counts, num_ranks_);
  std::vector<int64_t> all(mine.size() * static_cast<size_t>(num_ranks_));
  Call gather;
  gather.collective = Collective::kAllGather;
  gather.input = mine.data();
  gather.output = all.data();
  gather.count = static_cast<int64_t>(mine.size());
  gather.dtype = DType::kI64;
  gather.num_dims = 1;
  gather.shape[0] = gather.count;
  gather.site = call.site;
  gather.timeout_s = call.timeout_s;
  perform(gather, on_slow);
  check_counts(all, segment_, sequence_);
}

void Communicator::perform(const Call& call, const OnSlow& on_slow) {
  const Call& plain =
      NormalizedCall::is_plain(call) ? call : plain_call_.prepare(call, rank_, num_ranks_);
  const int64_t nbytes = payload_bytes(plain);
  // Done first, because it may refuse the call. A refused call gets no sequence number, and the
  // peers do not see it.
  CallPlan& plan = planner_.find({call.collective, nbytes, call.root, call.algorithm,
                                  call.block_counts != nullptr || call.send_counts != nullptr,
                                  order_needed(call)});
  PlannedCall* planned = plan.slots;
  const CallRecord& record = recorder_.prepare(call, sequence_ + 1, *planned);
  waiter_.begin(record.sequence, record.digest,
                call.timeout_s > 0 ? call.timeout_s : timeout_s_.load(), on_slow);
  // A broken communicator publishes no more records: the last ones show what broke it.
  if (load_acquire(segment_.failure_word()) != 0) {
    recorder_.refuse();
    waiter_.raise_failure(record);
  }
  recorder_.publish();
  sequence_ = record.sequence;

  if (nbytes == 0) {
    if (proxy_ != nullptr)
      proxy_->request_status(-1, sequence_);  // no message informs the other hosts
    if (!waiter_.peers_agree()) raise_failure();
    recorder_.finish();
    return;
  }
  std::optional<HostLinks::RunningCall> running;
  if (proxy_ != nullptr) [[unlikely]]
    running.emplace(proxy_->host_links());
  const bool timed = plan.num_calls++ % kTimedEvery == kTimedEvery - 1;
  const int64_t start = timed ? now_ns() : 0;
  if (&plain != &call) plain_call_.scale_input(call);
  std::optional<bool> done;
  if (plan.exchanges_buffers && call.collective != Collective::kBarrier) {
    done = runner_.run_direct(plain, nbytes, plan, planned);
    if (planned != plan.slots) recorder_.runs(*planned);
  }
  bool ok = done ? *done : runner_.run_slots(plain, nbytes, *planned);
  plan.tuned.end();
  // Such a rank may not have seen a mismatch in any message or wait.
  if (ok && Recorder::may_leave_early(call, rank_, num_ranks_)) ok = waiter_.peers_agree();
  if (proxy_ != nullptr) [[unlikely]]
    proxy_->flush_remaining();
  if (!ok) raise_failure();
  recorder_.finish();
  ++planned->num_calls;
  if (timed) {
    const double took_s = static_cast<double>(now_ns() - start) * 1e-9;
    planned->measured_s += (took_s - planned->measured_s) / (planned->measured_s == 0 ? 1 : 8);
  }
}

int64_t Communicator::payload_bytes(const Call& call) const {
  const auto element_size = static_cast<int64_t>(dtype_size(call.dtype));
  if (call.block_counts != nullptr) {
    return element_size *
           std::accumulate(call.block_counts, call.block_counts + num_ranks_, int64_t{0});
  }
  // Each rank knows only its own counts, but the plan must be identical on all ranks.
  if (call.send_counts != nullptr) return kUnevenBytes;
  return call.count * element_size * info(call.collective).blocks_per_payload(num_ranks_);
}

void Communicator::barrier() {
  uint8_t token = 0;
  Call call;
  call.collective = Collective::kBarrier;
  call.input = call.output = &token;
  call.count = 1;
  call.dtype = DType::kU8;
  call.op = Op::kMax;
  run(call);
}

std::unique_ptr<Communicator> Communicator::split(int color, int key,
                                                  Deadline::Interrupt interrupt) {
  // Gathers all colors and keys by a sum: each rank fills in its own two elements.
  std::vector<int64_t> all(static_cast<size_t>(2 * num_ranks_), 0);
  all[static_cast<size_t>(2 * rank_)] = color;
  all[static_cast<size_t>(2 * rank_ + 1)] = key;
  Call call;
  call.input = call.output = all.data();
  call.count = 2 * num_ranks_;
  call.dtype = DType::kI64;
  run(call);

  const int split = num_splits_++;
  if (color < 0) return nullptr;
  std::vector<int> members;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (all[static_cast<size_t>(2 * rank)] == color) members.push_back(rank);
  }
  std::stable_sort(members.begin(), members.end(), [&all](int a, int b) {
    return all[static_cast<size_t>(2 * a + 1)] < all[static_cast<size_t>(2 * b + 1)];
  });
  const std::string id = std::to_string(split) + "-" + std::to_string(color);
  // A member whose sum of the colors failed, unlike this rank's, does not come.
  const auto watch = [this] {
    if (load_acquire(segment_.failure_word()) != 0) raise_failure();
  };
  const Deadline deadline = Deadline::after_s(timeout_s_, std::move(interrupt)).with(watch);
  return std::make_unique<Communicator>(transport_->make_subgroup(members, id, deadline),
                                        timeout_s_, inputs_);
}

void Communicator::add_schedule(const Schedule& schedule) {
  const std::lock_guard lock(run_mutex_);
  planner_.add_schedule(schedule);
}

std::string Communicator::explain(Collective collective, int64_t nbytes, int root, Arrays arrays) {
  const std::lock_guard lock(run_mutex_);
  PlanKey wanted;
  wanted.collective = collective;
  wanted.nbytes = nbytes;
  wanted.root = root;
  return planner_.explain(wanted, arrays, transport_->name());
}

}  // namespace pycoll
