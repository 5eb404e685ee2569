// Lines by which ranks exchange buffer addresses when they enter an operation on each other's
// buffers, and report that they are done with them. Each takes one cache-line transfer.
//
// Exchange numbers are identical on all ranks. When all ranks wait for all, a rank that has seen
// every rank's exchange k-1 knows that all have read exchange k-2, so two lines per rank suffice. A
// rank whose own buffers rule out direct access does not wait, and may overwrite an exchange that
// other ranks have not read. They see a later number, which has the same meaning: no direct access.
#pragma once

#include <cstdint>

#include "transport/ring/slot.h"

namespace pycoll {

enum ExchangeFlags : uint32_t {
  kMappedBuffers = 1,   // every buffer of the rank is in memory that all ranks map
  kProcessBuffers = 2,  // no buffer of the rank is in such memory
  kInPlace = 4,         // input and output are the same memory
  kReadsProcesses = 8,  // this rank can read the memory of all peers' processes
  kNoHeap = 16,         // this rank cannot reach the heap
  kWantsLines = 32,     // peers return lines that they have only read (executor/cpu/peer_loads.h)
};

struct alignas(kFlagBytes) ExchangeLine {
  uint64_t number = 0;  // written first, decremented, and again last
  uint64_t input = 0;   // with kMappedBuffers an offset into the heap, else an address
  uint64_t output = 0;
  uint64_t digest = 0;
  uint64_t flags = 0;
  uint64_t entered_ns = 0;  // by the clock of the host, if the ranks compare their times
  uint64_t left_ns = 0;     // of the operation before; 0: its time does not count

  /// Writes `said` into this line. A reader that reads one of its words and then the number again
  /// sees that the number has changed: each store releases that of the number.
  void write(const ExchangeLine& said) {
    store_relaxed(number, said.number - 1);
    store_release(input, said.input);
    store_release(output, said.output);
    store_release(digest, said.digest);
    store_release(flags, said.flags);
    store_release(entered_ns, said.entered_ns);
    store_release(left_ns, said.left_ns);
    store_release(number, said.number);
  }
  /// Reads this line. If a later exchange was written meanwhile, the number is higher than before
  /// the call.
  ExchangeLine read() const {
    ExchangeLine seen;
    seen.input = load_acquire(input);
    seen.output = load_acquire(output);
    seen.digest = load_acquire(digest);
    seen.flags = load_acquire(flags);
    seen.entered_ns = load_acquire(entered_ns);
    seen.left_ns = load_acquire(left_ns);
    seen.number = load_relaxed(number);
    return seen;
  }
};
static_assert(sizeof(ExchangeLine) == kFlagBytes);

struct alignas(64) CacheLine {
  uint64_t value = 0;
};

/// Lines that a rank writes and one peer reads, to measure what the rank's next writes take.
struct alignas(kFlagBytes) TrialLines {
  static constexpr int kNumLines = 64;
  CacheLine kept[kNumLines];
  CacheLine returned[kNumLines];
};

/// One rank's lines.
struct ExchangeMemory {
  ExchangeLine entered[2];  // by number % 2
  // Number of the last exchange whose results this rank's output has, or that it has only read.
  FlagLine results;
  FlagLine done;     // number of the last exchange that this rank has finished
  FlagLine outside;  // number of the last exchange that this rank has left unfinished
  TrialLines trial;
};

}  // namespace pycoll
