// The work of one thread of a block for one launch: opens the rings of its channel, interprets the
// program on its channel's tiles, and stores the rings' positions for the next launch.
#pragma once

#include <type_traits>

#include "executor/device/block_direct.h"
#include "executor/device/block_lines.h"
#include "executor/device/block_long_lines.h"

namespace pycoll {

/// Maps a DeviceProtocol to its protocol type.
template <DeviceProtocol kind>
struct BlockProtocol;
template <>
struct BlockProtocol<DeviceProtocol::kSimple> : Simple {};
template <>
struct BlockProtocol<DeviceProtocol::kLL> : LowLatency {};
template <>
struct BlockProtocol<DeviceProtocol::kLL128> : LowLatency128 {};
template <>
struct BlockProtocol<DeviceProtocol::kPoison> : Poison {};
template <>
struct BlockProtocol<DeviceProtocol::kDirect> : BlockDirect {};

/// True for the protocols and dtypes that have a kernel. kPoison needs a NaN that arithmetic never
/// produces.
PYCOLL_HD constexpr bool has_kernel(DeviceProtocol protocol, DType dtype) {
  if (protocol != DeviceProtocol::kPoison) return true;
  const DTypeKind kind = dtype_kind(dtype);
  return (kind == DTypeKind::kFloat || kind == DTypeKind::kComplex) && dtype != DType::kF8E4M3;
}

/// `Fixed` has the program as a constant and interprets it in place of the launch's steps; void:
/// the steps are interpreted (benchmarks/fixed_program.h measures the difference).
template <DeviceProtocol kind, DType dtype, class Env, class Fixed = void>
class BlockRun {
 public:
  PYCOLL_HD BlockRun(const Env& env, const DeviceLaunch& launch, int channel, BlockShared& shared)
      : block_(env, launch, channel, shared), launch_(launch), channel_(channel), shared_(shared) {}

  PYCOLL_HD void run() {
    open_links();
    if (block_.thread_index() == 0) share_program();
    // An operation behind a failed one has the positions of that one: its messages would overwrite
    // those that late peers still read.
    bool may_run = device::load_relaxed(*launch_.failed) == 0;
    if (block_.thread_index() == 0) may_run = may_run && begin_epoch();
    if (!block_.agree(may_run)) return;
    if constexpr (kind == DeviceProtocol::kPoison) announce();
    if (!run_program(shared_.program, shared_.payload)) return;
    close_links();
    if (block_.thread_index() == 0) end_epoch();
  }

 private:
  PYCOLL_HD bool run_program(const ProgramView& program, const Payload& payload) {
    if constexpr (kind == DeviceProtocol::kDirect) {
      const bool meets = launch_.waits_in_stream == 0;
      return (!meets || BlockDirect::meet(block_, program, 0)) &&
             interpret<BlockDirect>(block_, program, payload) &&
             (!meets || BlockDirect::meet(block_, program, launch_.num_steps));
    } else if constexpr (kind == DeviceProtocol::kPoison) {
      return interpret<Poison>(block_, program, payload) && check_announcements(program);
    } else if constexpr (!std::is_void_v<Fixed>) {
      return Fixed::template interpret<BlockProtocol<kind>>(block_, program, payload);
    } else {
      return interpret<BlockProtocol<kind>>(block_, program, payload);
    }
  }

  /// Copies the program into the block's shared memory: its tables are indexed at run time, and the
  /// registers are needed for data.
  PYCOLL_HD void share_program() {
    const bool inline_program = launch_.steps == nullptr;
    shared_.program = {inline_program ? launch_.inline_steps : launch_.steps,
                       inline_program ? launch_.inline_places : launch_.places,
                       launch_.num_steps,
                       launch_.num_pieces,
                       launch_.peers,
                       launch_.self_position};
    shared_.deadline_ns = block_.env().clock_ns() + launch_.timeout_ns;
    Payload& payload = shared_.payload;
    for (int i = 0; i < kNumBuffers; ++i) {
      payload.buffers[i] = launch_.buffers[i];
      payload.starts[i] = launch_.starts[i];
    }
    payload.block_counts = launch_.block_counts;
    payload.count = launch_.count;
    payload.tile_count = launch_.tile_count;
    payload.first_tile = channel_;
    payload.tile_stride = launch_.num_channels;
    payload.granule = launch_.granule;
  }

  /// Opens and closes the links with peer i in thread i.
  PYCOLL_HD void open_links() {
    const DeviceLinks& links = launch_.links;
    for (int i = block_.thread_index(); i < launch_.num_peers; i += block_.num_threads()) {
      const int peer = launch_.peers[i];
      const DeviceRing send = links.send[at(peer)];
      const DeviceRing recv = links.recv[at(peer)];
      DeviceRingState state = links.states[at(peer)];
      const auto slot_mask = static_cast<uint64_t>(links.num_slots - 1);
      auto first_sent = static_cast<int32_t>(state.posted & slot_mask);
      auto first_received = static_cast<int32_t>(state.released & slot_mask);
      if constexpr (kind == DeviceProtocol::kPoison) {
        // Each call starts in the next third of the slots, whatever the number of earlier messages.
        first_sent = first_received = buffer() * (links.num_slots / kPoisonBuffers);
      }
      block_.links().send[peer].open(
          {send.slots, send.tail, send.head, links.slot_bytes, links.num_slots, first_sent},
          state.posted, state.credit);
      block_.links().recv[peer].open(
          {recv.slots, recv.tail, recv.head, links.slot_bytes, links.num_slots, first_received},
          state.released);
    }
  }
  PYCOLL_HD void close_links() {
    for (int i = block_.thread_index(); i < launch_.num_peers; i += block_.num_threads()) {
      const int peer = launch_.peers[i];
      const device::BlockSendEnd& send = block_.links().send[peer];
      launch_.links.states[at(peer)] = {send.posted(), block_.links().recv[peer].released(),
                                        send.credit(), 0};
    }
  }

  /// Marks the start of this call. False if another call uses the links, which are then in an
  /// unknown state: a graph is replayed beside another operation. A call that ends early leaves the
  /// mark, and the failed word. Called by one thread.
  PYCOLL_HD bool begin_epoch() {
    uint64_t& word = launch_.links.epochs[channel_];
    const uint64_t now = device::load_relaxed(word);
    if (now % 2 != 0) return block_.overlap();
    device::store_relaxed(word, now + 1);
    return true;
  }
  PYCOLL_HD void end_epoch() {
    uint64_t& word = launch_.links.epochs[channel_];
    device::store_relaxed(word, device::load_relaxed(word) + 1);
  }

  // kPoison has no room for a digest in its lines: each rank sends it to its peers once per call,
  // in a separate word.

  PYCOLL_HD uint64_t epoch() const {
    return device::load_relaxed(launch_.links.epochs[channel_]) / 2;
  }
  PYCOLL_HD int buffer() const { return static_cast<int>(epoch() % kPoisonBuffers); }
  PYCOLL_HD void announce() {
    for (int i = block_.thread_index(); i < launch_.num_peers; i += block_.num_threads()) {
      FlagLine& tail = *launch_.links.send[at(launch_.peers[i])].tail;
      device::store_ordered(tail.marks[buffer()], launch_.digest);
      device::store_release(tail.value, epoch() + 1);
    }
  }
  /// Compares the peers' digests. These were sent before the bytes, so the wait is short.
  PYCOLL_HD bool check_announcements(const ProgramView& program) {
    const bool same = block_.for_own_peers(program, [&](int peer) {
      const FlagLine& tail = *launch_.links.recv[at(peer)].tail;
      const uint64_t expected = epoch() + 1;
      const int last = launch_.num_steps - 1;
      const auto came = [&] {
        return device::load_relaxed(tail.value) >= expected &&
               device::load_acquire(tail.value) >= expected;
      };
      return block_.spin_until(came, {peer, last}) &&
             (device::load_ordered(tail.marks[buffer()]) == launch_.digest ||
              block_.mismatch(peer, last));
    });
    return block_.agree(same);
  }

  PYCOLL_HD int at(int peer) const { return channel_ * launch_.num_ranks + peer; }

  Block<Env, dtype> block_;
  const DeviceLaunch& launch_;
  int channel_;
  BlockShared& shared_;
};

}  // namespace pycoll
