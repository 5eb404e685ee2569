#include "comm/device/device_runner.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "comm/device/streams/peer_copies.h"
#include "comm/runner.h"

namespace pycoll {
namespace {

// Tile size without slots: it only determines how the work is split among blocks.
constexpr int64_t kDirectTileBytes = 1 << 20;
// Number of blocks for all_to_all with counts, where no rank knows all sizes.
constexpr int kUnevenChannels = 4;

/// Whether all ranks have equal arrays: a rank without an array, or with one of another size,
/// cannot know its place.
bool has_equal_arrays(const Call& call) {
  return call.input != nullptr && call.output != nullptr && !info(call.collective).has_root &&
         call.block_counts == nullptr && call.send_counts == nullptr;
}

bool is_direct_name(std::string_view algorithm) {
  return algorithm.ends_with("/direct") || algorithm.ends_with("/copy");
}

}  // namespace

DeviceRunner::DeviceRunner(Transport& transport, const Device& device,
                           const std::shared_ptr<const SelectionInputs>& inputs, Waiter& waiter,
                           const AllGather& gather, const Deadline& deadline)
    : transport_(transport),
      device_(device),
      waiter_(waiter),
      rank_(transport.rank()),
      num_ranks_(transport.num_ranks()),
      slab_(device),
      arrays_(device, num_ranks_, slab_),
      pinned_(device, 2 * kFlagBytes),
      last_(device),
      captured_last_(device) {
  if (device.table().launch_bytes != sizeof(DeviceLaunch)) {
    throw UsageError(std::string("the library of ") + device.title() +
                     " belongs to another version of pycoll: rebuild both");
  }
  device.check(device.table().preload(device.index()), "loading the kernels");
  const auto n = static_cast<size_t>(num_ranks_);
  std::vector<DeviceIntroduction> all(n);
  const DeviceIntroduction mine = introduce(device);
  gather(&mine, all.data(), sizeof(mine));
  choose_waits(all, gather, deadline);
  share_blocks(all);
  const DeviceFacts facts = device.facts();
  block_threads_ = facts.block_threads;
  const DeviceRings rings{num_ranks_, max_channels_, all_share(all) ? facts.cache_bytes : 0};
  planner_ = std::make_unique<DevicePlanner>(rank_, rings, inputs, slab_, waits_in_streams_);

  const size_t window_bytes = DeviceLinkMemory::window_bytes(rings);
  const bool wants_cpu = std::any_of(
      all.begin(), all.end(), [](const DeviceIntroduction& one) { return one.wants_cpu != 0; });
  std::string why = "PYCOLL_DEVICE_LINKS=cpu";
  if (!wants_cpu) {
    const auto memory = std::make_shared<DeviceMemory>(device, window_bytes);
    window_ = DeviceWindow::over(transport, device, {memory->data(), window_bytes, memory}, gather,
                                 deadline, why);
    if (window_ != nullptr && !(why = window_->test(transport, gather)).empty()) window_.reset();
  }
  if (window_ == nullptr) {
    window_ = DeviceWindow::of_cpu_memory(transport, device, window_bytes, gather, deadline);
    path_ = "through pinned CPU memory (" + why + ")";
  } else {
    path_ = "through each other's device memory";
    const std::string note = device.facts().memory_note;  // of the memory just allocated
    if (!note.empty()) path_ += " (" + note + ")";
  }
  if (waits_in_streams_) {
    staging_ = std::make_unique<PeerStaging>(transport, device, window_->is_on_host(), slab_,
                                             gather, deadline);
  }
  links_ = std::make_unique<DeviceLinkMemory>(device, *window_, rank_, rings);
  whole_lines_ = !window_->is_on_host() && all_share(all);

  for (const DeviceIntroduction& one : all) {
    if (&one == &all[static_cast<size_t>(rank_)] || transport.shares_address_space()) {
      devices_.push_back(one.index);
    }
  }
  // If several ranks of this process use this device, they launch together.
  std::vector<int> members;
  for (size_t rank = 0; rank < n && transport.shares_address_space(); ++rank) {
    if (all[rank].index == device.index()) members.push_back(static_cast<int>(rank));
  }
  const auto num_threads = static_cast<int>(members.size());
  if (num_threads > facts.num_queues) num_sharing_queues_ = num_threads;
  const bool leads = members.size() > 1 && members[0] == rank_;
  if (leads) meeting_ = std::make_shared<DeviceMeeting>(device, members);
  uint64_t offered = leads ? reinterpret_cast<uint64_t>(&meeting_) : 0;
  std::vector<uint64_t> meetings(n);
  gather(&offered, meetings.data(),
         sizeof(offered));  // after this, all ranks have made their links
  if (members.size() > 1 && !leads) {
    meeting_ = *reinterpret_cast<const std::shared_ptr<DeviceMeeting>*>(
        meetings[static_cast<size_t>(members[0])]);
  }
  gather(&offered, meetings.data(), sizeof(offered));  // after this, no rank reads an offer
  watchdog_ = std::make_unique<DeviceWatchdog>(
      transport, reinterpret_cast<uint64_t*>(pinned_.data()),
      reinterpret_cast<DeviceReport*>(pinned_.data() + kFlagBytes), stream_waits_.get());
}

void DeviceRunner::choose_waits(const std::vector<DeviceIntroduction>& all, const AllGather& gather,
                                const Deadline& deadline) {
  takes_turns_ = take_turns(all);
  waits_in_streams_ = pycoll::choose_waits(all) == DeviceWaits::kStreams;
  why_no_stream_waits_ = pycoll::why_no_stream_waits(all);
  if (why_no_stream_waits_.empty()) {
    stream_waits_ = std::make_unique<StreamWaits>(transport_, device_, gather, deadline);
  }
}

void DeviceRunner::share_blocks(const std::vector<DeviceIntroduction>& all) {
  try {
    max_channels_ = channels_for(all, device_, transport_.shares_address_space());
  } catch (const UsageError& error) {
    if (!waits_in_streams_) throw;
    why_no_blocks_ = error.what();
    max_channels_ = 1;  // kernels that do not wait need not be resident together
  }
  blocks_ =
      std::make_unique<DeviceBlocks>(device_.index(), why_no_blocks_.empty() ? max_channels_ : 0);
}

DeviceRunner::~DeviceRunner() { finish(); }

void DeviceRunner::finish() {
  try {
    // A kernel that waits for a peer ends by its own deadline, or by the watchdog's abort word.
    last_.synchronize();
  } catch (const CudaError&) {
    // The device is lost, so nothing runs on it any more.
  }
}

void DeviceRunner::take_back() {
  watchdog_->look();  // sets the abort word
  // Kernels of threads' ranks reach this rank's arrays at the same addresses: only their end helps.
  for (const int device : devices_) (void)device_.table().synchronize_device(device);
  if (watchdog_->error().code == DeviceFailure::kNone || transport_.shares_address_space()) return;
  arrays_.withdraw(watchdog_->failed_operation());
}

void DeviceRunner::disown() {
  watchdog_->disown();
  (void)watchdog_.release();
}

std::string DeviceRunner::describe() const {
  std::string text = device_.title() + ", " + path_ + ", at most " + std::to_string(max_channels_) +
                     " blocks of " + std::to_string(block_threads_) + " threads";
  if (takes_turns_) text += ", processes that take turns on a device without MPS";
  if (meets_all()) text += ", arrays of this process accessed in place";
  if (waits_in_streams_) text += ", streams wait for peers in place of kernels";
  const std::string unreached = arrays_.describe_unreached();
  return unreached.empty() ? text : text + "; " + unreached;
}

std::string DeviceRunner::warning() const {
  if (takes_turns_ && !waits_in_streams_) {
    return "ranks in several processes share " + device_.title() +
           " without MPS, and its streams cannot wait for words: their kernels take turns, so each "
           "wait for a peer lasts a time slice of some milliseconds. Start "
           "nvidia-cuda-mps-control -d, or use one GPU for each rank";
  }
  if (num_sharing_queues_ == 0) return {};
  return std::to_string(num_sharing_queues_) + " ranks that are threads share " + device_.title() +
         ", which has " + std::to_string(device_.facts().num_queues) +
         " hardware queues in this process: kernels of captured calls, one for each rank, may wait "
         "for each other until the deadline. Set CUDA_DEVICE_MAX_CONNECTIONS to the number of "
         "ranks, at most 32, before the process uses the device, or use fewer ranks";
}

void* DeviceRunner::room(DeviceMemory& memory, size_t nbytes, const Call& call) {
  if (nbytes <= memory.nbytes()) return memory.data();
  if (device_.capture_of(call.stream) != 0) {
    throw UsageError(std::string(info(call.collective).name) + " needs " + std::to_string(nbytes) +
                     " bytes of device memory, which cannot be allocated while a stream is "
                     "captured: call it once before the capture");
  }
  // At least doubles the size. The old memory is kept, so its total never exceeds the memory in
  // use.
  DeviceMemory larger(device_, std::max(nbytes, 2 * memory.nbytes()));
  std::swap(memory, larger);
  if (larger.data() != nullptr) outgrown_.push_back(std::move(larger));
  return memory.data();
}

void DeviceRunner::scale_input(const Call& call, void* dst, int64_t count) {
  order_behind_last(call.stream, device_.capture_of(call.stream));
  device_.check(device_.table().scale(device_.index(), dst, call.input, count,
                                      static_cast<int32_t>(call.dtype), call.factor, call.stream),
                "scaling the input of premul");
}

void DeviceRunner::order_behind_last(DeviceStream stream, uint64_t capture) {
  // All operations use the same links, so they run one after another. The caller orders captured
  // operations and others: a replay must run behind all earlier calls.
  if (capture != 0) {
    if (capture == capture_ && stream != captured_stream_) {
      captured_last_.record(captured_stream_);
      captured_last_.hold(stream);
    }
    capture_ = capture;
    captured_stream_ = stream;
    return;
  }
  last_.order(stream);
}

DeviceStream DeviceRunner::stream_beside(DeviceStream stream) {
  if (beside_ == nullptr) {
    beside_ = std::make_unique<Stream>(device_);
    before_beside_ = std::make_unique<StreamEvent>(device_);
  }
  before_beside_->record(stream);
  before_beside_->hold(beside_->get());
  return beside_->get();
}

PlannedCall& DeviceRunner::choose(const CallPlan& plan, Call& call) {
  if (PlannedCall* const planned = direct_by_meeting(plan, call)) {
    places_.reset();
    staged_ = false;
    return *planned;
  }
  const CollectiveInfo& row = info(call.collective);
  if (!find_places(plan, call)) {
    if (!is_direct_name(call.algorithm)) return *plan.slots;
    throw UsageError(std::string(row.name) + ": algorithm " + std::string(call.algorithm) +
                     " needs arrays that all ranks can access: make them with "
                     "comm.empty(device=...)");
  }
  PlannedCall* planned = plan.of(Reach::kMapped, !staged_ && call.input == call.output);
  if (planned == nullptr) {
    throw UsageError(std::string(row.name) + ": algorithm " + std::string(call.algorithm) +
                     " cannot work in place: pass out=");
  }
  if (is_direct(planned->protocol)) {
    call.places_hash = places_->hash;
  } else {
    places_.reset();
    staged_ = false;
  }
  return *planned;
}

bool DeviceRunner::find_places(const CallPlan& plan, const Call& call) {
  places_.reset();
  staged_ = false;
  if (!plan.exchanges_buffers) return false;
  if (has_equal_arrays(call) || call.collective == Collective::kBroadcast) {
    const size_t element_size = dtype_size(call.dtype);
    places_ = arrays_.find(
        call.input, static_cast<size_t>(input_count(call, rank_, num_ranks_)) * element_size,
        call.output, static_cast<size_t>(output_count(call, rank_, num_ranks_)) * element_size);
  }
  if (!places_ && staging_ != nullptr && PeerStaging::can(call)) {
    staged_ = true;
    places_ = staging_->places();
  }
  return places_.has_value();
}

PlannedCall* DeviceRunner::direct_by_meeting(const CallPlan& plan, const Call& call) const {
  if (!meets_all() || !plan.exchanges_buffers || !has_equal_arrays(call)) return nullptr;
  if (device_.capture_of(call.stream) != 0) return nullptr;
  // No rank knows whether another one works in place, so both must run the same plan.
  PlannedCall* const planned = plan.of(Reach::kMapped, true);
  const bool is_same = planned == plan.of(Reach::kMapped, false);
  return is_same && planned != nullptr && planned->protocol == ProtocolKind::kDirect ? planned
                                                                                     : nullptr;
}

const char* DeviceRunner::why_not(const Call& call, PlannedCall& planned) {
  if (planned.protocol == ProtocolKind::kLL128 && !whole_lines_) {
    return "protocol ll128 needs ranks that share a device, because other links may split lines of "
           "128 bytes";
  }
  if (planned.protocol == ProtocolKind::kCopy && stream_waits_ == nullptr) {
    return why_no_stream_waits_.c_str();
  }
  if (!is_direct(planned.protocol) && !why_no_blocks_.empty()) return why_no_blocks_.c_str();
  if (planned.protocol != ProtocolKind::kPoison) return nullptr;
  if (call.collective != Collective::kAllReduce || num_ranks_ == 1 ||
      !poison_allowed(call.dtype, call.op)) {
    return "protocol poison is for all_reduce of floating-point dtypes except f8_e4m3 on several "
           "ranks only";
  }
  const DevicePlan& plan = planner_->of(planned, device_.capture_of(call.stream) != 0);
  const DeviceLinks& links = links_->links(DeviceProtocol::kPoison);
  if (kPoisonBuffers * plan.program.max_link_messages > links.num_slots) {
    return "protocol poison has room for two messages to a peer: use one_shot or two_shot";
  }
  const int64_t tile = device_tile_count(planned.plan, links.slot_bytes, dtype_size(call.dtype));
  if ((call.count + tile - 1) / tile > max_channels_) {
    return "protocol poison needs a payload of at most one slot for each block";
  }
  return nullptr;
}

void DeviceRunner::prepare(const Call& call, PlannedCall& planned) {
  plan_ = &planner_->of(planned, device_.capture_of(call.stream) != 0);
  fill(staged_ ? staging_->call_on_copies(call, staging_->part(call, 0)) : call);
}

void DeviceRunner::fill(const Call& call) {
  const DevicePlan& plan = *plan_;
  DeviceLaunch& launch = next_;
  launch = plan.model;
  launch.count = call.count;
  launch.dtype = call.dtype;
  launch.op = call.op;
  launch.divisor = call.op == Op::kAvg ? num_ranks_ : 1;
  launch.rank = rank_;
  launch.buffers[static_cast<int>(BufferKind::kInput)] =
      const_cast<std::byte*>(static_cast<const std::byte*>(call.input));
  launch.buffers[static_cast<int>(BufferKind::kOutput)] = static_cast<std::byte*>(call.output);
  if (places_) {
    launch.peer_inputs = places_->peer_inputs;
    launch.peer_outputs = places_->peer_outputs;
    launch.input_offset = places_->input_offset;
    launch.output_offset = places_->output_offset;
  }
  if (call.block_counts != nullptr || call.send_counts != nullptr) set_counts(call, launch);
  set_tiles(call, plan, launch);
  if (plan.num_scratch_blocks != 0) {
    launch.buffers[static_cast<int>(BufferKind::kScratch)] = static_cast<std::byte*>(
        room(scratch_,
             plan.num_scratch_blocks * static_cast<size_t>(launch.count) * dtype_size(call.dtype),
             call));
  }
  launch.num_threads = block_threads_;
  launch.links = links_->links(launch.protocol);
  launch.abort_word = reinterpret_cast<const uint64_t*>(pinned_.data());
  launch.report = reinterpret_cast<DeviceReport*>(pinned_.data() + kFlagBytes);
  launch.failed = links_->failed_word();
  const ProtocolKind protocol = plan.planned->protocol;
  if (protocol == ProtocolKind::kCopy || (protocol == ProtocolKind::kDirect && waits_in_streams_)) {
    launch.waits_in_stream = 1;
    // The watchdog sets this word before it ends the waits, and the kernel behind them ends, too.
    launch.failed = reinterpret_cast<uint64_t*>(pinned_.data());
  }
}

bool DeviceRunner::launch(const Call& call, const CallRecord& record, double timeout_s) {
  const uint64_t capture = device_.capture_of(call.stream);
  order_behind_last(call.stream, capture);
  DeviceLaunch& launch = next_;
  if (launch.block_counts != nullptr) {
    device_.copy(const_cast<int64_t*>(launch.block_counts), staged_counts_.data(),
                 staged_counts_.size() * sizeof(int64_t), call.stream);
  }
  launch.operation = record.sequence;
  // A graph may be replayed at any later time.
  if (places_) DeviceArrays::use(*places_, capture == 0 ? record.sequence : UINT64_MAX);
  launch.digest = record.digest;
  launch.timeout_ns = static_cast<int64_t>(timeout_s * 1e9);
  if (launch.waits_in_stream != 0) {
    launch_between_waits(call);
  } else if (meeting_ != nullptr && capture == 0) {
    if (!meeting_->launch(rank_, launch, call.stream, waiter_)) return false;
  } else {
    device_.check(device_.table().launch(device_.index(), &launch, call.stream),
                  "launching a kernel");
  }
  if (capture == 0) last_.queued(call.stream);
  return true;
}

void DeviceRunner::launch_between_waits(const Call& call) {
  const DeviceLaunch whole = next_;
  int64_t begin = 0;
  do {
    const CallPart part = staged_ ? staging_->part(call, begin) : CallPart{0, call.count};
    if (staged_) {
      staging_->fetch(call, part);
      fill(staging_->call_on_copies(call, part));
      next_.operation = whole.operation;
      next_.digest = whole.digest;
      next_.timeout_ns = whole.timeout_ns;
    }
    stream_waits_->begin(next_, call.stream);
    if (plan_->planned->protocol == ProtocolKind::kCopy) {
      queue_peer_copies(device_, next_, plan_->program, *places_, call.stream);
    } else {
      device_.check(device_.table().launch(device_.index(), &next_, call.stream),
                    "launching a kernel");
    }
    stream_waits_->end(next_, call.stream);
    if (staged_) staging_->deliver(call, part);
    begin += part.count;
  } while (begin < call.count);
}

void DeviceRunner::set_tiles(const Call& call, const DevicePlan& plan, DeviceLaunch& launch) const {
  const size_t element_size = dtype_size(call.dtype);
  launch.granule = device_granule(element_size);
  const DeviceLinks& links = links_->links(launch.protocol);
  const int64_t payload = device_payload_bytes(launch.protocol, links.slot_bytes, element_size);
  launch.tile_count = launch.protocol == DeviceProtocol::kDirect
                          ? kDirectTileBytes / static_cast<int64_t>(element_size)
                          : device_tile_count(plan.planned->plan, payload, element_size);
  if (plan.planned->plan.spans_blocks) {
    // Some range contains several whole blocks, so the message is one tile, which fits
    // (Planner::make).
    launch.tile_count = (launch.count + launch.granule - 1) / launch.granule * launch.granule;
    launch.num_channels = 1;
    return;
  }
  // The number must be identical on all ranks, so it cannot depend on this rank's counts.
  if (call.send_counts != nullptr) {
    launch.num_channels = std::min(max_channels_, kUnevenChannels);
    return;
  }
  const int64_t block_bytes = launch.count * static_cast<int64_t>(element_size);
  const int64_t payload_bytes = block_bytes * info(call.collective).blocks_per_payload(num_ranks_);
  const DeviceCut cut = device_cut(launch.protocol, launch.count, payload_bytes, launch.granule,
                                   launch.tile_count, max_channels_);
  launch.num_channels = cut.num_channels;
  launch.tile_count = cut.tile_count;
}

void DeviceRunner::set_counts(const Call& call, DeviceLaunch& launch) {
  if (device_.capture_of(call.stream) != 0) {
    throw UsageError(std::string(info(call.collective).name) +
                     " with counts cannot be captured, because its tables come from the CPU");
  }
  // Block counts, starts in the input, starts in the output. Pointers to unused tables stay null.
  const auto n = static_cast<size_t>(num_ranks_);
  const size_t num_blocks = call.block_counts != nullptr ? n : n * n;
  staged_counts_.assign(num_blocks + 2 * n, 0);
  int64_t* const counts = staged_counts_.data();
  int64_t* const input_starts = counts + num_blocks;
  int64_t* const output_starts = input_starts + n;
  const auto prefix_sums = [n](const int64_t* of, int64_t* sums) {
    std::partial_sum(of, of + n - 1, sums + 1);
  };
  auto* const on_device =
      static_cast<int64_t*>(room(counts_, staged_counts_.size() * sizeof(int64_t), call));
  const auto& at = [&](const int64_t* staged) { return on_device + (staged - counts); };
  const int64_t*& in = launch.starts[static_cast<int>(BufferKind::kInput)];
  const int64_t*& out = launch.starts[static_cast<int>(BufferKind::kOutput)];
  if (call.block_counts != nullptr) {
    std::copy_n(call.block_counts, n, counts);
    prefix_sums(call.block_counts, input_starts);
    (call.collective == Collective::kReduceScatter ? in : out) = at(input_starts);
  } else {
    const auto r = static_cast<size_t>(rank_);
    for (size_t peer = 0; peer < n; ++peer) {
      counts[r * n + peer] = call.send_counts[peer];
      counts[peer * n + r] = call.recv_counts[peer];
    }
    prefix_sums(call.send_counts, input_starts);
    prefix_sums(call.recv_counts, output_starts);
    in = at(input_starts);
    out = at(output_starts);
  }
  launch.block_counts = on_device;
  launch.count = *std::max_element(counts, counts + num_blocks);
}

}  // namespace pycoll
