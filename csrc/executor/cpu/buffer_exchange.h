// Entering and leaving an operation in which ranks use each other's buffers.
//
// At the exchange every rank says where its buffers are and learns where all others' are; all see
// the same, so all come to the same decision about how to go on. At the exit every rank says that
// it is done with the others' buffers; nobody's buffers go back to the caller before.
#pragma once

#include <vector>

#include "executor/wait/wait.h"
#include "transport/memory/peer_memory.h"
#include "transport/transport.h"

namespace pycoll {

/// How the ranks of an operation can reach each other's buffers.
enum class Reach : uint8_t {
  kNone,     // some cannot: bytes go through slots
  kMapped,   // by plain loads and stores
  kProcess,  // by the kernel, from process to process
};
inline constexpr int kNumReaches = 3;

/// A peer's buffers: pointers here when the reach is kMapped, addresses there when it is kProcess.
struct PeerBuffers {
  uint64_t input = 0;
  uint64_t output = 0;
  pid_t pid = 0;
};

class BufferExchange {
 public:
  BufferExchange(Transport& transport, Waiter& waiter, PeerMemory& peer_memory);

  struct Buffer {
    const void* data;
    size_t nbytes;  // 0: the rank has none
  };
  /// Tells the peers about both buffers and waits for theirs; a rank does not wait whose buffers
  /// alone decide that slots it is. `with_processes`: the kernel's way will do, too; alike on all
  /// ranks. False when a wait failed.
  bool exchange(const Buffer& input, const Buffer& output, bool with_processes);
  /// Of the last exchange; the same on all ranks.
  Reach reach() const { return reach_; }
  /// Some rank's input and output are the same memory.
  bool in_place() const { return in_place_; }
  /// By rank; of the last exchange.
  const std::vector<PeerBuffers>& peers() const { return peers_; }

  /// Says that this rank is done and waits until all others are. False when a wait failed.
  bool leave();

 private:
  bool in_heap(const Buffer& buffer) const;
  uint32_t flags_of(const Buffer& buffer) const;
  uint64_t say(const Buffer& buffer) const;
  bool can_use_processes();
  void ring_bells();

  Transport& transport_;
  Segment& segment_;
  Waiter& waiter_;
  PeerMemory& peer_memory_;
  SharedHeap* heap_;  // the transport keeps it
  int rank_;
  int num_ranks_;
  uint64_t number_ = 0;  // of the last exchange
  bool probed_ = false;
  bool reads_processes_ = false;
  Reach reach_ = Reach::kNone;
  bool in_place_ = false;
  std::vector<PeerBuffers> peers_;
};

}  // namespace pycoll
