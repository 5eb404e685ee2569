// Runs one operation of a rank: interprets the plan's program on the call's buffers, through slots
// or directly on the ranks' own buffers.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/call.h"
#include "comm/call_plan.h"
#include "comm/planner.h"
#include "executor/cpu/cpu_target.h"
#include "executor/cpu/reachable_buffers.h"
#include "transport/transport.h"

namespace pycoll {

class Runner {
 public:
  /// `checksum_bytes`: size of the checksum behind the bytes of each slot.
  Runner(Transport& transport, Waiter& waiter, PeerMemory& peer_memory, const PlannerLinks& links,
         size_t checksum_bytes);

  /// Exchanges the buffers' places with the other ranks, and sets `planned` accordingly. Runs it if
  /// it is direct; returns nullopt if it needs slots. Raises UsageError on all ranks if the buffers
  /// do not allow the named algorithm. When it fails, no other rank can access the buffers any
  /// more.
  std::optional<bool> run_direct(const Call& call, int64_t nbytes, CallPlan& plan,
                                 PlannedCall*& planned);
  /// Runs a plan through slots. Like run_direct(), returns false if a wait failed; the waiter has
  /// the failure.
  bool run_slots(const Call& call, int64_t nbytes, PlannedCall& planned);

  /// Gives up the shared heap. No operation is under way, and none follows.
  void release() { buffers_.release(); }

  const Ledger& ledger() const { return cpu_.ledger(); }

 private:
  std::optional<bool> run_on_buffers(const Call& call, int64_t nbytes, CallPlan& plan,
                                     PlannedCall*& planned);
  /// Whether claims of lines of peers' arrays are faster than what else there is. Where cores share
  /// no cache and ranks outnumber them, returned lines are (decision 0113).
  bool pays_to_claim_arrays(int64_t nbytes) const;
  /// Exchanges the places of the call's buffers, and also times if plans are being tuned.
  bool exchange_buffers(CallPlan& plan, int64_t nbytes);
  /// The plan of this turn, or slots where these arrays do not allow it.
  PlannedCall* tuned_plan(CallPlan& plan);

  template <class Protocol>
  bool run(const Call& call, const Plan& plan, const Payload& payload);
  /// How many tiles of a call are in flight at once (interpret_together): between hosts some, to
  /// hide latency; on a host some where a rank would otherwise send and receive in turn, since a
  /// core copies faster when it first writes several slots and then reads several (decision 0112).
  int num_tiles_together(const Call& call, const Plan& plan) const;
  /// Whether this rank, which only receives, copies its own block tile by tile: if it copied all of
  /// it first, peers whose slots are full would wait (decision 0131). Not if ranks share cores.
  bool copies_between_messages(const Plan& plan) const;
  /// Bytes of a message, at most.
  int64_t most_bytes(ProtocolKind protocol) const {
    return links_.slot_payloads[static_cast<size_t>(protocol)];
  }
  /// Elements of a block in one tile of a call through `simple`. Between hosts, the tiles of a long
  /// call leave out what would be a small packet at the end of each message (decision 0127).
  int64_t simple_tile_count(const Call& call, const Plan& plan) const;
  /// How a call through `simple` uses its slots. Where each rank has a core, lines should not be in
  /// the caches of both ranks when they are written again: two ranks trade places (decision 0122);
  /// else readers claim lines of the smallest messages (decision 0113), and others take turns in
  /// all slots (decision 0108), or plans that ask for it have readers claim all lines of few slots
  /// (decision 0130). Where ranks share a core, and its caches, they use so few slots that lines
  /// are still there (decision 0111).
  SlotUse slot_use_of(const Call& call, int64_t nbytes, const PlannedCall& planned,
                      const Payload& payload) const;
  Payload payload_of(const Call& call, const Plan& plan);
  void set_block_counts(const Call& call, Payload& payload);
  /// Copies the elements [first, end) of the blocks.
  static void copy_blocks(const Payload& payload, const std::vector<BlockCopy>& copies,
                          size_t element_size, int64_t first = 0, int64_t end = INT64_MAX);
  CpuArithmetic arithmetic_of(const Call& call, int64_t nbytes, int64_t streaming_bytes) const;
  /// Whether ranks outnumber cores, and the outputs of a core's ranks do not fit its caches.
  bool fills_shared_caches(const Call& call) const;
  void account(const Payload& payload, const PlannedCall& direct);

  Transport& transport_;
  int rank_;
  int num_ranks_;
  const PlannerLinks& links_;
  CpuTarget cpu_;
  Links simple_links_;
  Links ll_links_;
  ReachableBuffers buffers_;
  BufferExchange exchange_;
  std::unique_ptr<std::byte[]> scratch_;  // as large as the largest call needed
  size_t scratch_bytes_ = 0;
  std::vector<int64_t> block_counts_;  // for a call whose blocks differ
  std::vector<int64_t> starts_;
  std::vector<int64_t> more_starts_;
};

/// Elements of the call's input and output on this rank.
int64_t input_count(const Call& call, int rank, int num_ranks);
int64_t output_count(const Call& call, int rank, int num_ranks);

}  // namespace pycoll
