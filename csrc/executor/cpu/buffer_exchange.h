// Entry to and exit from an operation in which ranks use each other's buffers.
//
// In the exchange, each rank publishes its buffers' addresses and reads those of all other ranks.
// All ranks see the same data, so all decide in the same way how to proceed. At the exit each rank
// announces that it no longer uses its peers' buffers; no rank returns its buffers to the caller
// until then.
#pragma once

#include <vector>

#include "executor/cpu/peer_loads.h"
#include "executor/wait/wait.h"
#include "transport/memory/peer_memory.h"
#include "transport/transport.h"

namespace pycoll {

/// How the ranks of an operation can reach each other's buffers.
enum class Reach : uint8_t {
  kNone,     // some ranks cannot: bytes travel through slots
  kMapped,   // by plain loads and stores
  kProcess,  // by system calls that read another process's memory; nothing writes it
};
inline constexpr int kNumReaches = 3;

/// The time of an operation, from when its last rank enters to when its last rank leaves.
struct OperationTimes {
  uint64_t entered_ns = 0;
  uint64_t left_ns = 0;  // of the operation before; 0: its time does not count
};

/// A peer's buffers: pointers in this process if the reach is kMapped, addresses in the peer's
/// process if it is kProcess.
struct PeerBuffers {
  uint64_t input = 0;
  uint64_t output = 0;
  pid_t pid = 0;
  bool wants_lines = false;  // that were only read: PeerLoads
};

class BufferExchange {
 public:
  BufferExchange(Transport& transport, Waiter& waiter, PeerMemory& peer_memory);

  struct Buffer {
    const void* data;
    size_t nbytes;  // 0: the rank has none
  };
  /// Publishes both buffers to the peers and waits for theirs. A rank whose own buffers already
  /// rule out direct access does not wait. `nbytes` are those of the operation, and
  /// `with_processes` also allows Reach::kProcess; both must be equal on all ranks. `times` are
  /// those of this rank. Returns false when a wait failed.
  bool exchange(const Buffer& input, const Buffer& output, int64_t nbytes, bool with_processes,
                const OperationTimes& times = {});
  /// Reach found by the last exchange; equal on all ranks.
  Reach reach() const { return reach_; }
  /// True when some rank's input and output are the same memory.
  bool in_place() const { return in_place_; }
  /// True when the reach is kMapped and some rank measures that its core shares no cache with that
  /// of a peer (PeerLoads).
  bool is_far() const { return is_far_; }
  /// The latest times of all ranks in the last exchange; 0 where a rank has said 0. Equal on all
  /// ranks if all have waited.
  const OperationTimes& latest() const { return latest_; }
  /// Buffers of the last exchange, by rank.
  const std::vector<PeerBuffers>& peers() const { return peers_; }

  const PeerLoads& loads() const { return loads_; }
  /// Whether this rank may write its peers' inputs (as they are). An array of a thread may be in
  /// memory that is read-only; those of processes are in the heap.
  bool may_claim() const { return loads_.claims() && !transport_.shares_address_space(); }

  /// Announces that this rank's output has its results and waits for those of all others. Returns
  /// false when a wait failed.
  bool await_results() { return await_all(&ExchangeMemory::results); }
  /// Waits until all ranks have read what this rank has published. Not in an operation that also
  /// calls await_results(). Returns false when a wait failed.
  bool await_readers() { return await_all(&ExchangeMemory::results); }
  /// Announces that this rank is done and waits for all others. Returns false when a wait failed,
  /// or when the communicator broke before all were done: a rank that had given up may have changed
  /// the buffers that this rank was reading.
  bool leave() { return await_all(&ExchangeMemory::done) && waiter_.is_whole(); }
  /// Announces that this rank uses no peer's buffers, although it has not left. Call it whenever
  /// the operation does not end by leave().
  void stay_outside() { store_release(segment_.exchange(rank_).outside.value, number_); }
  /// Waits until no other rank of this process uses this rank's buffers. Call it once the
  /// communicator is broken, so that no rank enters any more.
  void await_absence();

 private:
  bool in_heap(const Buffer& buffer) const;
  uint32_t flags_of(const Buffer& buffer) const;
  uint64_t say(const Buffer& buffer) const;
  bool can_use_processes();
  bool await_all(FlagLine ExchangeMemory::* line);
  void ring_bells();

  Transport& transport_;
  Segment& segment_;
  Waiter& waiter_;
  PeerMemory& peer_memory_;
  SharedHeap* heap_;  // owned by the transport
  int rank_;
  int num_ranks_;
  uint64_t number_ = 0;  // of the last exchange
  bool probed_ = false;
  bool reads_processes_ = false;
  Reach reach_ = Reach::kNone;
  bool in_place_ = false;
  bool is_far_ = false;
  OperationTimes latest_;
  std::vector<PeerBuffers> peers_;
  PeerLoads loads_;
};

}  // namespace pycoll
