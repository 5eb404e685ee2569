#include "executor/cpu/buffer_exchange.h"

#include <sched.h>

#include <algorithm>

#include "base/thread.h"

namespace pycoll {
namespace {

/// The later of two times; 0 if one is 0, which is no time.
uint64_t later(uint64_t a, uint64_t b) { return a == 0 || b == 0 ? 0 : std::max(a, b); }

}  // namespace

BufferExchange::BufferExchange(Transport& transport, Waiter& waiter, PeerMemory& peer_memory)
    : transport_(transport),
      segment_(transport.segment()),
      waiter_(waiter),
      peer_memory_(peer_memory),
      heap_(transport.heap().get()),
      rank_(transport.rank()),
      num_ranks_(transport.num_ranks()),
      peers_(static_cast<size_t>(num_ranks_)),
      loads_(segment_, rank_, num_ranks_) {}

bool BufferExchange::in_heap(const Buffer& buffer) const {
  return heap_ != nullptr && heap_->contains(buffer.data, buffer.nbytes);
}

uint32_t BufferExchange::flags_of(const Buffer& buffer) const {
  if (buffer.nbytes == 0) return kMappedBuffers | kProcessBuffers;
  return transport_.shares_address_space() || in_heap(buffer) ? kMappedBuffers : kProcessBuffers;
}

uint64_t BufferExchange::say(const Buffer& buffer) const {
  if (buffer.nbytes != 0 && !transport_.shares_address_space() && in_heap(buffer)) {
    return heap_->offset_of(buffer.data);
  }
  return reinterpret_cast<uint64_t>(buffer.data);
}

bool BufferExchange::exchange(const Buffer& input, const Buffer& output, int64_t nbytes,
                              bool with_processes, const OperationTimes& times) {
  ++number_;
  const size_t parity = number_ % 2;
  ExchangeLine own;
  const bool threads = transport_.shares_address_space();
  own.input = say(input);
  own.output = say(output);
  own.digest = waiter_.digest();
  own.flags = (flags_of(input) & flags_of(output)) | (input.data == output.data ? kInPlace : 0u) |
              (reads_processes_ ? kReadsProcesses : 0u) |
              (!threads && heap_ == nullptr ? kNoHeap : 0u) | (loads_.enter() ? kWantsLines : 0u);
  own.entered_ns = times.entered_ns;
  own.left_ns = times.left_ns;
  own.number = number_;
  segment_.exchange(rank_).entered[parity].write(own);
  ring_bells();
  reach_ = Reach::kNone;
  is_far_ = false;
  latest_ = {};
  // Ranks that do wait see the reason, or see that this rank has moved on.
  if (!with_processes && (own.flags & kMappedBuffers) == 0) return true;

  uint64_t all = ~uint64_t{0};
  uint64_t any = 0;
  OperationTimes latest = times;
  bool has_moved_on = false;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const ExchangeLine& line = segment_.exchange(rank).entered[parity];
    if (!waiter_.spin_until([&] { return load_acquire(line.number) >= number_; }, {rank, 0, 0})) {
      return false;
    }
    // A rank that has entered a later operation used slots in this one, and did not wait.
    const ExchangeLine seen = line.read();
    if (seen.number != number_) {
      has_moved_on = true;
      continue;
    }
    if (seen.digest != waiter_.digest()) return waiter_.mismatch(rank);
    all &= seen.flags;
    any |= seen.flags;
    latest = {later(latest.entered_ns, seen.entered_ns), later(latest.left_ns, seen.left_ns)};
    peers_[static_cast<size_t>(rank)] = {seen.input, seen.output, transport_.pid(rank),
                                         (seen.flags & kWantsLines) != 0};
  }
  if (has_moved_on) return true;
  // A rank that gave up has taken its buffers away, or waits for those that entered before.
  if (!waiter_.is_whole()) return false;
  if (!probed_ && with_processes) {
    // In the first exchange, the ranks find out what the system allows; then they exchange again.
    probed_ = true;
    reads_processes_ = can_use_processes();
    return exchange(input, output, nbytes, with_processes, times);
  }
  in_place_ = (any & kInPlace) != 0;
  latest_ = latest;
  if ((all & kMappedBuffers) != 0 && (any & kNoHeap) == 0) {
    reach_ = Reach::kMapped;
    is_far_ = (any & kWantsLines) != 0;
    loads_.entered(nbytes);
    for (PeerBuffers& peer : peers_) {
      if (threads) continue;
      peer.input = reinterpret_cast<uint64_t>(heap_->at(peer.input));
      peer.output = reinterpret_cast<uint64_t>(heap_->at(peer.output));
    }
  } else if (with_processes && (all & kProcessBuffers) != 0 && (all & kReadsProcesses) != 0) {
    reach_ = Reach::kProcess;
  }
  return true;
}

bool BufferExchange::can_use_processes() {
  if (transport_.shares_address_space()) return false;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_ && !peer_memory_.reaches(rank)) return false;
  }
  return true;
}

bool BufferExchange::await_all(FlagLine ExchangeMemory::* line) {
  store_release((segment_.exchange(rank_).*line).value, number_);
  ring_bells();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const uint64_t& reached = (segment_.exchange(rank).*line).value;
    if (!waiter_.spin_until([&] { return load_acquire(reached) >= number_; },
                            {rank, 0, 0, /*for_credit=*/false})) {
      return false;
    }
  }
  return true;
}

void BufferExchange::await_absence() {
  if (!transport_.shares_address_space()) return;
  waiter_.let_go();
  // A rank writes that it has entered, then reads the failure word. After this barrier either it
  // has seen the failure, or this rank sees that it has entered.
  fence_other_threads();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const ExchangeMemory& peer = segment_.exchange(rank);
    const auto is_inside = [&] {
      return load_acquire(peer.entered[number_ % 2].number) == number_ &&
             load_acquire(peer.done.value) < number_ && load_acquire(peer.outside.value) < number_;
    };
    while (rank != rank_ && is_inside()) ::sched_yield();
  }
}

void BufferExchange::ring_bells() {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_) segment_.ring_bell(rank);
  }
}

}  // namespace pycoll
