#include "comm/runner.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "executor/cpu/cpu_direct.h"
#include "executor/interpret_together.h"

namespace pycoll {
namespace {

// Results of at least this size are written around the caches, which avoids reading output lines
// before they are overwritten. For smaller ones the caches are faster.
constexpr int64_t kStreamingBytes = int64_t{32} << 20;
// The same threshold for bytes that go through slots and are not reduced, and for broadcasts.
constexpr int64_t kMovedStreamingBytes = int64_t{16} << 20;
// The same threshold for direct plans, in which the rank that has a result writes it to the
// outputs. A reduce_scatter writes half as much as others for what it reads. A broadcast has one
// input and fits the caches longer: kMovedStreamingBytes.
constexpr int64_t kDirectStreamingBytes = int64_t{10} << 20;
constexpr int64_t kScatteredStreamingBytes = int64_t{6} << 20;
// The same threshold for copying a rank's own block, which no other rank reads.
constexpr int64_t kBlockStreamingBytes = int64_t{8} << 20;

// The same threshold where ranks share cores, for the outputs of the ranks of one core, which share
// its caches.
constexpr int64_t kCrowdedStreamingBytes = int64_t{16} << 20;

// Where cores share a cache, calls claim no lines of their peers' arrays if those of the ranks of
// one core exceed this: they leave the reader's cache by themselves before they are written again.
constexpr int64_t kMaxClaimedBytes = 1 << 20;

// Messages of calls that move fewer bytes take turns in the slots, and those of all broadcasts.
// Other large calls use the whole ring anyway, and most are slower with a larger one.
constexpr int64_t kMaxTurnBytes = int64_t{1} << 20;

// So many full slots stay in the caches of both ends, if the reader claims their lines.
constexpr uint64_t kFewSlots = 4;

// Where ranks share cores, and with them their caches: bytes of all ranks' messages that may be in
// rings at once. With one slot, a writer waits for its reader after each message, so two may take
// more. Towards a root, and from it, ranks run ahead, which many slots allow.
constexpr int64_t kCrowdedRingBytes = int64_t{3} << 20;
constexpr int64_t kTwoSlotsBytes = int64_t{8} << 20;
constexpr int64_t kRootedRingBytes = int64_t{16} << 20;

// Tiles in flight of a call in which each rank sends to all others and receives from all. More than
// half of a ring's slots would have its writer wait for its reader.
constexpr int kTilesOfExchange = 4;

// Between hosts: TCP makes packets of whole segments and at most 64 KiB, so they hold 61 KiB (7
// segments of 8,948 bytes, or 43 of 1,448). A full slot's frame would end in a small packet more.
constexpr int64_t kPacketKiB = 61;
constexpr int64_t kManyTiles = 32;  // so that a call has few tiles more

int64_t direct_streaming_bytes(Collective collective) {
  if (collective == Collective::kBroadcast) return kMovedStreamingBytes;
  return collective == Collective::kReduceScatter ? kScatteredStreamingBytes
                                                  : kDirectStreamingBytes;
}

/// Elements of all blocks that `index_of`, a column of the table of collectives, puts in a buffer.
int64_t count_blocks(const Call& call, int rank, int num_ranks,
                     int (*index_of)(const BlockAt& at)) {
  const CollectiveInfo& row = info(call.collective);
  int64_t total = 0;
  for (int block = 0; block < num_blocks(row.blocks, num_ranks); ++block) {
    if (index_of({rank, block, num_ranks, call.root}) == kNoBlock) continue;
    total += call.block_counts != nullptr ? call.block_counts[block] : call.count;
  }
  return total;
}

}  // namespace

int64_t input_count(const Call& call, int rank, int num_ranks) {
  if (call.send_counts != nullptr) {
    return std::accumulate(call.send_counts, call.send_counts + num_ranks, int64_t{0});
  }
  return count_blocks(call, rank, num_ranks, info(call.collective).input_block);
}

int64_t output_count(const Call& call, int rank, int num_ranks) {
  if (call.recv_counts != nullptr) {
    return std::accumulate(call.recv_counts, call.recv_counts + num_ranks, int64_t{0});
  }
  return count_blocks(call, rank, num_ranks, info(call.collective).output_block);
}

Runner::Runner(Transport& transport, Waiter& waiter, PeerMemory& peer_memory,
               const PlannerLinks& links, size_t checksum_bytes)
    : transport_(transport),
      rank_(transport.rank()),
      num_ranks_(transport.num_ranks()),
      links_(links),
      cpu_(transport.segment(), waiter, num_ranks_),
      simple_links_(transport.segment(), rank_, ProtocolKind::kSimple, checksum_bytes),
      ll_links_(transport.segment(), rank_, ProtocolKind::kLL),
      buffers_(transport),
      exchange_(transport, waiter, peer_memory) {}

std::optional<bool> Runner::run_direct(const Call& call, int64_t nbytes, CallPlan& plan,
                                       PlannedCall*& planned) {
  const auto given = [&call](const void* data, int64_t count) {
    return ReachableBuffers::Given{static_cast<std::byte*>(const_cast<void*>(data)),
                                   static_cast<size_t>(count) * dtype_size(call.dtype)};
  };
  bool copies = plan.copies_arrays;
  if (plan.tuned.is_on()) {
    plan.tuned.begin(nbytes);
    copies = plan.tuned.wanted().reach == Reach::kMapped;
  }
  buffers_.find(given(call.input, input_count(call, rank_, num_ranks_)),
                given(call.output, output_count(call, rank_, num_ranks_)), copies);
  const std::optional<bool> done = run_on_buffers(call, nbytes, plan, planned);
  if (!done || !*done) exchange_.stay_outside();
  if (done && !*done) {
    exchange_.await_absence();
    buffers_.withdraw();
  }
  return done;
}

bool Runner::exchange_buffers(CallPlan& plan, int64_t nbytes) {
  TunedPlans& tuned = plan.tuned;
  const bool all_wait = tuned.is_on()
                            ? tuned.exchanges_times() || tuned.wanted().reach == Reach::kProcess
                            : plan.uses_processes;
  if (!exchange_.exchange(buffers_.input_buffer(), buffers_.output_buffer(), nbytes, all_wait,
                          tuned.is_on() ? tuned.times() : OperationTimes{})) {
    return false;
  }
  if (tuned.is_on()) tuned.heard(exchange_.latest());
  return true;
}

PlannedCall* Runner::tuned_plan(CallPlan& plan) {
  TunedPlans& tuned = plan.tuned;
  PlannedCall* const wanted = tuned.wanted().planned;
  const Reach wanted_reach = tuned.wanted().reach;
  const Reach reach = exchange_.reach();
  // Slots are for all arrays, and what is mapped needs no other way.
  const bool runs =
      wanted_reach == Reach::kNone
          ? reach != Reach::kMapped
          : reach == wanted_reach && (!exchange_.in_place() || wanted->in_place_allowed);
  if (!runs) {
    tuned.misses();
    return reach == Reach::kMapped ? plan.of(reach, exchange_.in_place()) : plan.slots;
  }
  // While another plan was the best, no call has seen whether slots are fast in the caches again.
  if (tuned.turn().begins && wanted_reach == Reach::kNone && tuned.best().reach != Reach::kNone) {
    simple_links_.try_caches();
  }
  return wanted;
}

bool Runner::pays_to_claim_arrays(int64_t nbytes) const {
  const int num_cores = transport_.segment().num_cores();
  return exchange_.is_far()
             ? num_ranks_ <= num_cores
             : nbytes * std::max(num_ranks_, num_cores) <= kMaxClaimedBytes * num_cores;
}

std::optional<bool> Runner::run_on_buffers(const Call& call, int64_t nbytes, CallPlan& plan,
                                           PlannedCall*& planned) {
  const auto element_size = static_cast<int64_t>(dtype_size(call.dtype));
  if (!exchange_buffers(plan, nbytes)) return false;
  const Reach reach = exchange_.reach();
  planned = plan.of(reach, exchange_.in_place());
  if (planned == nullptr) {
    throw UsageError(
        std::string(info(call.collective).name) + ": algorithm " + std::string(call.algorithm) +
        (plan.of(reach, false) != nullptr ? " cannot work in place: pass out="
                                          : ": the ranks cannot all access each other's arrays: "
                                            "make them with comm.empty()"));
  }
  if (plan.tuned.is_on()) planned = tuned_plan(plan);
  if (planned->protocol != ProtocolKind::kDirect) {
    // No rank may write its line of the exchange again before all have read this one.
    if (plan.tuned.is_on() && plan.tuned.exchanges_times()) {
      if (!exchange_.await_readers()) return false;
      plan.tuned.starts_work();
    }
    return std::nullopt;
  }
  Payload payload = payload_of(call, planned->plan);
  payload.buffers[static_cast<int>(BufferKind::kInput)] = buffers_.input();
  payload.buffers[static_cast<int>(BufferKind::kOutput)] = buffers_.output();
  payload.tile_count = payload.count;
  if (reach == Reach::kProcess && info(call.collective).has_op) {
    payload.tile_count = std::max<int64_t>(
        tile_count(planned->plan, Direct::kStageBytes, static_cast<size_t>(element_size)), 1);
  }
  const bool claims =
      planned->has_sole_readers && exchange_.may_claim() && pays_to_claim_arrays(nbytes);
  cpu_.begin(exchange_, payload,
             arithmetic_of(call, nbytes, direct_streaming_bytes(call.collective)),
             claims ? &planned->claims : nullptr);
  copy_blocks(payload, planned->plan.placement.before, static_cast<size_t>(element_size));
  copy_blocks(payload, planned->plan.placement.any_time, static_cast<size_t>(element_size));
  if (payload.count != 0 && !interpret<Direct>(cpu_, planned->plan.view(), payload)) return false;
  if (planned->has_results &&
      (!exchange_.await_results() ||
       !interpret<Direct::Results>(cpu_, planned->results.view(), payload))) {
    return false;
  }
  account(payload, *planned);
  if (!exchange_.leave()) return false;
  buffers_.deliver();
  return true;
}

bool Runner::run_slots(const Call& call, int64_t nbytes, PlannedCall& planned) {
  Payload payload = payload_of(call, planned.plan);
  const bool has_op = info(call.collective).has_op;
  const CpuArithmetic arithmetic =
      arithmetic_of(call, nbytes, has_op ? kStreamingBytes : kMovedStreamingBytes);
  copy_blocks(payload, planned.plan.placement.before, arithmetic.element_size);
  bool ok;
  if (planned.protocol == ProtocolKind::kLL) {
    cpu_.begin(ll_links_, arithmetic);
    payload.tile_count =
        tile_count(planned.plan, most_bytes(ProtocolKind::kLL), arithmetic.element_size);
    ok = run<LowLatency>(call, planned.plan, payload);
  } else {
    payload.tile_count = simple_tile_count(call, planned.plan);
    cpu_.begin(simple_links_, arithmetic, slot_use_of(call, nbytes, planned, payload));
    ok = run<Simple>(call, planned.plan, payload);
  }
  if (ok) copy_blocks(payload, planned.plan.placement.after, arithmetic.element_size);
  return ok;
}

int64_t Runner::simple_tile_count(const Call& call, const Plan& plan) const {
  const int64_t slot = most_bytes(ProtocolKind::kSimple);
  const size_t element_size = dtype_size(call.dtype);
  const int64_t count = tile_count(plan, slot, element_size);
  const bool same_on_all_ranks = call.block_counts == nullptr && call.send_counts == nullptr;
  if (transport_.segment().proxy() == nullptr || !same_on_all_ranks ||
      call.count < kManyTiles * count) {
    return count;
  }
  return tile_count(plan, slot * kPacketKiB / 64, element_size);
}

SlotUse Runner::slot_use_of(const Call& call, int64_t nbytes, const PlannedCall& planned,
                            const Payload& payload) const {
  const Segment& segment = transport_.segment();
  const Plan& plan = planned.plan;
  SlotUse use{static_cast<uint64_t>(segment.layout().num_slots)};
  if (segment.proxy() != nullptr) return use;  // a proxy does not know how calls use the slots
  if (segment.ranks_share_cores()) {
    const int64_t block_bytes = nbytes / info(call.collective).blocks_per_payload(num_ranks_);
    const int64_t message_bytes =
        std::min(block_bytes * plan.program.max_range / plan.placement.num_pieces,
                 most_bytes(ProtocolKind::kSimple));
    // A message may have one element more than the others.
    const int64_t longest =
        message_bytes + static_cast<int64_t>(dtype_size(call.dtype) + simple_links_.checksum_bytes);
    if (info(call.collective).has_root && longest <= int64_t{kShortSlotBytes}) {
      use.places = Places::kShort;  // ranks run ahead further, so those of a core take turns less
      return use;
    }
    // The least power of two that is safe, and more as long as all rings fit.
    auto num_slots = std::bit_ceil(static_cast<uint64_t>(plan.min_slots));
    const auto fit = [&] {
      const int64_t most = info(call.collective).has_root ? kRootedRingBytes
                           : num_slots == 1               ? kTwoSlotsBytes
                                                          : kCrowdedRingBytes;
      return 2 * static_cast<int64_t>(num_slots) * plan.num_rings * message_bytes <= most;
    };
    while (num_slots < use.num_slots && fit()) num_slots *= 2;
    use.num_slots = std::min(use.num_slots, num_slots);
    return use;
  }
  if (payload.block_counts == nullptr &&
      may_trade_places(plan, payload.count, payload.tile_count, num_tiles_together(call, plan))) {
    use.places = Places::kTraded;
    return use;
  }
  if (planned.claims_few_slots) {
    use.num_slots = std::max(kFewSlots, std::bit_ceil(static_cast<uint64_t>(plan.min_slots)));
    use.most_claimed = SIZE_MAX;
    return use;
  }
  const int64_t moved = call.collective == Collective::kAllReduce ? 2 * nbytes : nbytes;
  use.most_claimed = kMaxClaimedMessage;
  // Ranks with counts of their own do not know those of the others.
  if ((moved < kMaxTurnBytes || call.collective == Collective::kBroadcast) &&
      call.send_counts == nullptr) {
    use.places = Places::kTurns;
  }
  return use;
}

int Runner::num_tiles_together(const Call& call, const Plan& plan) const {
  const Segment& segment = transport_.segment();
  const CollectiveInfo& row = info(call.collective);
  int num_tiles = 1;
  if (segment.proxy() != nullptr) {
    num_tiles = kTilesTogether;
  } else if (!segment.ranks_share_cores() && row.blocks != Blocks::kOne && !row.has_root) {
    num_tiles = kTilesOfExchange;
  }
  return plan.min_slots * num_tiles <= segment.layout().num_slots ? num_tiles : 1;
}

bool Runner::copies_between_messages(const Plan& plan) const {
  const std::vector<Step>& steps = plan.program.steps;
  return !transport_.segment().ranks_share_cores() && !plan.placement.any_time.empty() &&
         std::all_of(steps.begin(), steps.end(),
                     [](const Step& step) { return step.dst_peers == 0; });
}

template <class Protocol>
bool Runner::run(const Call& call, const Plan& plan, const Payload& payload) {
  const auto copy = [&](int64_t first, int64_t end) {
    copy_blocks(payload, plan.placement.any_time, dtype_size(call.dtype), first, end);
  };
  // All ranks decide the same number, from values that are identical on all ranks.
  if (const int num_tiles = num_tiles_together(call, plan);
      payload.count > payload.tile_count && (num_tiles > 1 || copies_between_messages(plan))) {
    const std::vector<Step>& steps = plan.program.steps;
    StepEnds ends = step_ends(steps.data(), static_cast<int>(steps.size()));
    ends.num_first = num_steps_ahead(ends, links_.one_host, links_.one_per_host);
    return interpret_together<Protocol>(cpu_, plan.view(), payload, num_tiles, ends, copy);
  }
  copy(0, payload.count);
  return interpret<Protocol>(cpu_, plan.view(), payload);
}

Payload Runner::payload_of(const Call& call, const Plan& plan) {
  Payload payload;
  payload.count = call.count;
  if (call.block_counts != nullptr || call.send_counts != nullptr) set_block_counts(call, payload);
  const size_t needed =
      plan.placement.scratch.size() * static_cast<size_t>(payload.count) * dtype_size(call.dtype);
  if (needed > scratch_bytes_) {
    scratch_.reset(new std::byte[needed]);
    scratch_bytes_ = needed;
  }
  payload.buffers[static_cast<int>(BufferKind::kInput)] =
      const_cast<std::byte*>(static_cast<const std::byte*>(call.input));
  payload.buffers[static_cast<int>(BufferKind::kOutput)] = static_cast<std::byte*>(call.output);
  payload.buffers[static_cast<int>(BufferKind::kScratch)] = scratch_.get();
  return payload;
}

void Runner::set_block_counts(const Call& call, Payload& payload) {
  const auto n = static_cast<size_t>(num_ranks_);
  const auto prefix_sums = [](const int64_t* counts, size_t num, std::vector<int64_t>& sums) {
    sums.assign(num, 0);
    std::partial_sum(counts, counts + num - 1, sums.begin() + 1);
    return sums.data();
  };
  const int64_t*& input_starts = payload.starts[static_cast<int>(BufferKind::kInput)];
  const int64_t*& output_starts = payload.starts[static_cast<int>(BufferKind::kOutput)];
  if (call.block_counts != nullptr) {
    block_counts_.assign(call.block_counts, call.block_counts + n);
    const int64_t* starts = prefix_sums(call.block_counts, n, starts_);
    (call.collective == Collective::kReduceScatter ? input_starts : output_starts) = starts;
  } else {
    const auto r = static_cast<size_t>(rank_);
    block_counts_.assign(n * n, 0);  // a rank's program uses only the pairs that contain this rank
    for (size_t peer = 0; peer < n; ++peer) {
      block_counts_[r * n + peer] = call.send_counts[peer];
      block_counts_[peer * n + r] = call.recv_counts[peer];
    }
    input_starts = prefix_sums(call.send_counts, n, starts_);
    output_starts = prefix_sums(call.recv_counts, n, more_starts_);
  }
  payload.block_counts = block_counts_.data();
  payload.count = *std::max_element(block_counts_.begin(), block_counts_.end());
}

void Runner::copy_blocks(const Payload& payload, const std::vector<BlockCopy>& copies, size_t size,
                         int64_t first, int64_t end) {
  const auto element_size = static_cast<int64_t>(size);
  for (const BlockCopy& copy : copies) {
    const auto address = [&](BufferKind buffer, int32_t index) {
      return payload.buffers[static_cast<int>(buffer)] +
             (payload.start_of(buffer, index) + first) * element_size;
    };
    const std::byte* from = address(copy.from, copy.from_index);
    std::byte* to = address(copy.to, copy.to_index);
    if (from == to) continue;
    const int64_t count = payload.count_of(copy.block);
    const int64_t here = std::min(end, count) - first;
    if (here <= 0) continue;
    copy_from_peer(to, from, static_cast<size_t>(here * element_size),
                   count * element_size >= kBlockStreamingBytes);
  }
}

CpuArithmetic Runner::arithmetic_of(const Call& call, int64_t nbytes,
                                    int64_t streaming_bytes) const {
  CpuArithmetic arithmetic;
  arithmetic.element_size = dtype_size(call.dtype);
  arithmetic.reduce_copy = reduce_copy_fn(call.dtype, call.op);
  arithmetic.divisor = call.op == Op::kAvg ? num_ranks_ : 1;
  // Lines of an output that are read as inputs first are in the caches. A broadcast has no such
  // lines: its root writes none of its own.
  const bool reads_outputs = call.output == call.input && call.collective != Collective::kBroadcast;
  arithmetic.streaming = !reads_outputs && (nbytes >= streaming_bytes || fills_shared_caches(call));
  return arithmetic;
}

bool Runner::fills_shared_caches(const Call& call) const {
  const int num_cores = transport_.segment().num_cores();
  const bool all_have_outputs =
      !info(call.collective).has_root || call.collective == Collective::kBroadcast;
  if (num_ranks_ <= num_cores || !all_have_outputs) return false;
  const int64_t output_bytes =
      output_count(call, rank_, num_ranks_) * static_cast<int64_t>(dtype_size(call.dtype));
  return output_bytes * num_ranks_ >= kCrowdedStreamingBytes * num_cores;
}

void Runner::account(const Payload& payload, const PlannedCall& direct) {
  for (const BufferRef& given : direct.given) {
    const int64_t count =
        piece_range(payload.count_of(given.block), payload.granule,
                    direct.plan.placement.num_pieces, given.first_piece, given.num_pieces)
            .count;
    if (count == 0) continue;
    cpu_.count_sent(given.num_peers * count * static_cast<int64_t>(cpu_.element_size()),
                    given.num_peers);
  }
}

}  // namespace pycoll
