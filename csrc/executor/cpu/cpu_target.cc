#include "executor/cpu/cpu_target.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>
#include <utility>

#include "base/error.h"
#include "executor/cpu/cpu_direct.h"
#include "transport/memory/process_memory.h"
#include "transport/proxy/proxy.h"
#include "transport/ring/claim_lines.h"

namespace pycoll {
namespace {

constexpr size_t kMinReadAheadBytes = 4 * kReadAhead;  // of a message

/// By how much the first of several blocks is shorter than the others, so that it ends at a line
/// boundary of its destination: a line that is written partly past the caches and partly through
/// them costs more than ten whole lines.
int64_t bytes_past_line(const void* dst) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(dst) % kFlagBytes);
}

}  // namespace

CpuTarget::CpuTarget(Segment& segment, Waiter& waiter, int num_ranks)
    : segment_(segment),
      proxy_(segment.proxy()),
      waiter_(waiter),
      staging_(new std::byte[static_cast<size_t>(num_ranks + 1) *
                             static_cast<size_t>(LineBatch::kPayloadBytes)]) {}

void CpuTarget::on_post_to_hosts(const ProgramView& program, const StepOperands& operands) {
  const Step& step = *operands.step;
  const ProtocolKind protocol = links_->protocol;
  const auto nbytes = static_cast<int64_t>(num_bytes(operands) + links_->checksum_bytes);
  const std::byte* const sent = sent_from(operands);
  for_each_peer(program, step.dst_peers, [&](int peer) {
    if (proxy_->is_remote(peer)) {
      proxy_->on_post(protocol, peer, nbytes, waiter_.digest(), waiter_.sequence(), sent);
    } else {
      segment_.ring_bell(peer);
    }
    return true;
  });
  for_each_peer(program, step.src_peers, [&](int peer) {
    proxy_->is_remote(peer) ? proxy_->released(protocol, peer) : segment_.ring_bell(peer);
    return true;
  });
}

bool CpuTarget::await_remote(RecvEnd& link, const StepOperands& operands, const WaitSite& site) {
  const Step& step = *operands.step;
  const auto arrive = [&] { return spin_until([&link] { return link.has_full_slot(); }, site); };
  const bool only_copies = operands.local_dst != nullptr && operands.local_src == nullptr &&
                           std::has_single_bit(step.src_peers) &&
                           (!step.has(kFinal) || arithmetic_.divisor == 1);
  const size_t nbytes = num_bytes(operands);
  if (!only_copies || nbytes < kLongPayloadBytes || links_->checksum_bytes != 0 ||
      !proxy_->is_remote(site.peer) || link.has_full_slot()) {
    return arrive();
  }
  struct Expecting {
    Proxy& proxy;
    int peer;
    ~Expecting() { proxy.expect_no_more(peer); }
  };
  proxy_->expect(site.peer, {operands.local_dst, nbytes, link.sequence(), waiter_.digest()});
  const Expecting until_end{*proxy_, site.peer};
  return arrive();
}

void CpuTarget::reduce_copy(const ProgramView& program, const OneStep& phase) {
  const StepOperands& operands = phase.operands;
  const void* srcs[kMaxPeers + 1];
  void* dsts[kMaxPeers + 1];
  int num_srcs = 0;
  int num_dsts = 0;
  for_each_source(
      program, *links_, operands,
      [&](RecvEnd& link, int) {
        srcs[num_srcs++] = place_in(link, operands);
        return true;
      },
      [&] { srcs[num_srcs++] = operands.local_src; });
  // A message from another host may have been received there.
  const bool is_there = operands.local_src == nullptr && srcs[0] == operands.local_dst;
  const bool stores_locally = operands.local_dst != nullptr && !is_there;
  if (stores_locally) dsts[num_dsts++] = operands.local_dst;
  PeerStores* stores[kMaxPeers];
  int num_stores = 0;
  const bool sends_in_place = sent_from(operands) != nullptr;
  for_each_destination(program, *links_, *operands.step, [&](SendEnd& link, int peer) {
    if (sends_in_place && proxy_->is_remote(peer)) return true;
    dsts[num_dsts++] = place_in(link, operands);
    stores[num_stores++] = &link.stores();
    return true;
  });
  if (num_dsts == 0) return;
  const size_t nbytes = num_bytes(operands);
  // A proxy sends what it finds in the caches faster.
  const bool is_sent = proxy_ != nullptr && operands.step->dst_peers != 0;
  combine(srcs, num_srcs, dsts, num_dsts, operands,
          arithmetic_.streaming && stores_locally && !is_sent ? 1 : 0,
          nbytes >= kMinReadAheadBytes ? kReadAhead : 0, trades_places() ? nullptr : stores);
  if (nbytes < kMinClaimedMessage || nbytes > slot_use_.most_claimed ||
      operands.step->has(kMulticastSrc)) {
    return;
  }
  for (int i = 0; i < num_srcs; ++i) {
    if (srcs[i] == operands.local_src) continue;
    claim_lines(static_cast<std::byte*>(const_cast<void*>(srcs[i])), nbytes);
  }
}

void CpuTarget::combine(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts,
                        const StepOperands& operands, int num_streaming, size_t read_ahead,
                        PeerStores* const* stores) {
  const size_t count = static_cast<size_t>(operands.count);
  const int first_to_peer = std::max(dsts[0] == operands.local_dst ? 1 : 0, num_streaming);
  if (num_srcs == 1 && num_dsts == 1) {
    const size_t nbytes = count * arithmetic_.element_size;
    first_to_peer != 0
        ? copy_from_peer(dsts[0], srcs[0], nbytes, num_streaming != 0)
        : copy_to_peer(dsts[0], srcs[0], nbytes, stores == nullptr ? nullptr : stores[0]);
    return;
  }
  arithmetic_.reduce_copy({srcs, num_srcs, dsts, num_dsts, count,
                           operands.step->has(kFinal) ? arithmetic_.divisor : 1, num_streaming,
                           first_to_peer, stores, read_ahead});
}

void CpuTarget::begin(const BufferExchange& exchange, const Payload& payload,
                      const CpuArithmetic& arithmetic, PeerLoads::Claims* claims) {
  exchange_ = &exchange;
  claims_ = claims;
  if (claims != nullptr) claims->begin_call();
  payload_ = &payload;
  arithmetic_ = arithmetic;
  if (exchange.reach() == Reach::kProcess && stages_ == nullptr) {
    stages_.reset(new std::byte[(exchange.peers().size() + 1) * Direct::kStageBytes]);
  }
}

std::byte* CpuTarget::stage(int index) {
  return stages_.get() + static_cast<int64_t>(index) * Direct::kStageBytes;
}

bool CpuTarget::combine_in_place(const ProgramView& program, const StepOperands& operands) {
  const Step& step = *operands.step;
  const StepPlace& place = program.places[operands.index];
  const auto nbytes = static_cast<size_t>(operands.count) * arithmetic_.element_size;
  const bool mapped = exchange_->reach() == Reach::kMapped;
  const void* srcs[kMaxPeers + 1];
  int owners[kMaxPeers + 1];  // of the sources
  void* dsts[kMaxPeers + 1];
  int num_srcs = 0;
  int num_dsts = 0;
  if (operands.local_dst != nullptr) dsts[num_dsts++] = operands.local_dst;
  const bool only_takes = !mapped && operands.local_src == nullptr &&
                          operands.local_dst != nullptr && std::has_single_bit(step.src_peers);
  // The first source from another process is copied to where the result goes, which saves a stage's
  // lines. Not if this rank's own source is there, or if results are written past the caches.
  bool takes_to_result = !mapped && operands.local_dst != nullptr &&
                         operands.local_dst != operands.local_src &&
                         (only_takes || !arithmetic_.streaming);
  const bool came = visit_sources(
      program, operands,
      [&](int peer) {
        const PeerBuffers& buffers = exchange_->peers()[static_cast<size_t>(peer)];
        const uint64_t at =
            buffers.input + offset_in(BufferKind::kInput, place.peer_src_index, operands);
        if (mapped) {
          owners[num_srcs] = peer;
          srcs[num_srcs++] = reinterpret_cast<const void*>(at);
          return true;
        }
        std::byte* to =
            std::exchange(takes_to_result, false) ? operands.local_dst : stage(num_srcs);
        srcs[num_srcs++] = to;
        return read_process(buffers.pid, at, to, nbytes) || process_memory_failed(peer, operands);
      },
      [&] {
        owners[num_srcs] = -1;
        srcs[num_srcs++] = operands.local_src;
      });
  if (!came) return false;
  if (mapped) {
    for_each_peer(program, step.dst_peers, [&](int peer) {
      const PeerBuffers& buffers = exchange_->peers()[static_cast<size_t>(peer)];
      const uint64_t at =
          buffers.output + offset_in(BufferKind::kOutput, place.peer_dst_index, operands);
      dsts[num_dsts++] = reinterpret_cast<void*>(at);
      return true;
    });
    combine_mapped(srcs, owners, num_srcs, dsts, num_dsts, operands);
    return true;
  }
  if (!only_takes && num_dsts != 0) {
    combine(srcs, num_srcs, dsts, num_dsts, operands, arithmetic_.streaming ? num_dsts : 0);
  }
  return true;
}

void CpuTarget::combine_mapped(const void* const* srcs, int* owners, int num_srcs,
                               void* const* dsts, int num_dsts, const StepOperands& operands) {
  const auto combine_block = [&](const void* const* from, void* const* to,
                                 const StepOperands& block, size_t read_ahead) {
    combine(from, num_srcs, to, num_dsts, block, arithmetic_.streaming ? num_dsts : 0, read_ahead);
  };
  bool returns_lines = false;
  for (int i = 0; i < num_srcs; ++i) {
    const bool only_read = std::find(dsts, dsts + num_dsts, srcs[i]) == dsts + num_dsts;
    if (owners[i] < 0) continue;
    if (!only_read || num_bytes(operands) > PeerLoads::kMaxBytes ||
        (claims_ == nullptr && !exchange_->peers()[static_cast<size_t>(owners[i])].wants_lines)) {
      owners[i] = -1;
    }
    returns_lines = returns_lines || owners[i] >= 0;
  }
  const bool claims = claims_ != nullptr;
  if (claims && returns_lines) look_at_lines(srcs, owners, num_srcs, num_bytes(operands));
  if (!returns_lines || (claims && !claims_->is_rewritten())) {
    return combine_block(srcs, dsts, operands, 0);
  }
  const bool leaves_end = claims && claims_->leaves_end();

  const auto element_size = static_cast<int64_t>(arithmetic_.element_size);
  const size_t block_bytes = claims ? PeerLoads::kClaimedBytes : PeerLoads::kBlockBytes;
  const int64_t block_count = static_cast<int64_t>(block_bytes) / element_size;
  constexpr auto kLeftBytes = static_cast<int64_t>(PeerLoads::kLookedAtBytes);
  const int64_t claimed_count = operands.count - (leaves_end ? kLeftBytes / element_size : 0);
  const void* from[kMaxPeers + 1];
  void* to[kMaxPeers + 1];
  bool returns[kMaxPeers + 1];
  int64_t count = block_count - bytes_past_line(dsts[0]) / element_size;
  for (int64_t at = 0; at < operands.count; at += count, count = block_count) {
    StepOperands block = operands;
    block.count = std::min(count, operands.count - at);
    const size_t nbytes = num_bytes(block);
    for (int i = 0; i < num_srcs; ++i) {
      const auto* src = static_cast<const std::byte*>(srcs[i]) + at * element_size;
      from[i] = src;
      returns[i] =
          owners[i] >= 0 && (claims ? at + block.count <= claimed_count
                                    : nbytes >= PeerLoads::kMinBytes &&
                                          exchange_->loads().is_new(owners[i], src, nbytes));
    }
    for (int i = 0; i < num_dsts; ++i) to[i] = static_cast<std::byte*>(dsts[i]) + at * element_size;
    const bool is_last = at + block.count == operands.count;
    combine_block(from, to, block, claims && !is_last ? kReadAhead : 0);
    for (int i = 0; i < num_srcs; ++i) {
      auto* const src = static_cast<std::byte*>(const_cast<void*>(from[i]));
      if (returns[i]) claims ? claim_lines(src, nbytes) : PeerLoads::give_back(src, nbytes);
    }
  }
}

void CpuTarget::look_at_lines(const void* const* srcs, const int* owners, int num_srcs,
                              size_t nbytes) {
  if (!claims_->looks()) return;
  const auto first = std::find_if(owners, owners + num_srcs, [](int owner) { return owner >= 0; });
  const auto* const src = static_cast<const std::byte*>(srcs[first - owners]);
  claims_->found(exchange_->loads().is_rewritten(*first, src, nbytes));
}

bool CpuTarget::read_result(const ProgramView& program, const StepOperands& operands) {
  const StepPlace& place = program.places[operands.index];
  const auto nbytes = static_cast<size_t>(operands.count) * arithmetic_.element_size;
  return for_each_peer(program, operands.step->src_peers, [&](int peer) {
    const PeerBuffers& buffers = exchange_->peers()[static_cast<size_t>(peer)];
    const uint64_t at =
        buffers.output + offset_in(BufferKind::kOutput, place.peer_src_index, operands);
    return read_process(buffers.pid, at, operands.local_dst, nbytes) ||
           process_memory_failed(peer, operands);
  });
}

uint64_t CpuTarget::offset_in(BufferKind buffer, int32_t index,
                              const StepOperands& operands) const {
  return static_cast<uint64_t>((payload_->start_of(buffer, index) + operands.offset) *
                               static_cast<int64_t>(arithmetic_.element_size));
}

bool CpuTarget::process_memory_failed(int peer, const StepOperands& operands) {
  // If the process has ended, a wait for this rank, which can never succeed, reports it.
  if (errno == ESRCH) {
    return waiter_.spin_until([] { return false; },
                              {peer, operands.index, operands.step->first_chunk});
  }
  throw_system_error("access to the memory of rank " + std::to_string(peer) + "'s process");
}

void CpuTarget::LineBatch::finish() {
  const size_t element_size = target_.arithmetic_.element_size;
  std::byte* local = operands_.local_dst == nullptr ? nullptr : operands_.local_dst + at_;
  if (num_srcs_ == 1) {
    result_ = static_cast<const std::byte*>(srcs_[0]);
    if (local != nullptr) std::memcpy(local, result_, static_cast<size_t>(num_bytes_));
    return;
  }
  void* out = local != nullptr ? local : staging(num_srcs_);
  target_.arithmetic_.reduce_copy(
      {srcs_, num_srcs_, &out, 1, static_cast<size_t>(num_bytes_) / element_size,
       operands_.step->has(kFinal) ? target_.arithmetic_.divisor : 1, false});
  result_ = static_cast<const std::byte*>(out);
}

}  // namespace pycoll
