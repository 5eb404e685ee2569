// What ranks tell each other when they enter an operation on each other's buffers, and when they
// are done with them. One flight of one cache line each.
//
// Exchanges are numbered alike on all ranks. Where all wait for all, a rank that has seen
// everyone's exchange k-1 knows that all are done reading exchange k-2, so two lines per rank
// suffice. A rank whose arrays decide against it goes on without waiting, and may write a later
// exchange over one that others have yet to read; they see the other number, and that is the same
// answer.
#pragma once

#include <cstdint>

#include "transport/ring/slot.h"

namespace pycoll {

enum EntranceFlags : uint32_t {
  kMappedBuffers = 1,   // no buffer of the rank is elsewhere than in memory that all ranks map
  kProcessBuffers = 2,  // no buffer of the rank is in such memory
  kInPlace = 4,         // input and output are the same memory
  kReadsProcesses = 8,  // this rank has read the memory of all peers' processes
  kNoHeap = 16,         // this rank cannot reach the heap
};

struct alignas(kFlagBytes) ExchangeLine {
  uint64_t number = 0;  // written first, one too low, and last
  uint64_t input = 0;   // an offset into the heap with kMappedBuffers, else an address
  uint64_t output = 0;
  uint64_t digest = 0;
  uint64_t flags = 0;

  /// Writes `said` here. A reader that meets a word of it, and looks at the number again, sees that
  /// it has changed: each store releases the one of the number.
  void write(const ExchangeLine& said) {
    store_relaxed(number, said.number - 1);
    store_release(input, said.input);
    store_release(output, said.output);
    store_release(digest, said.digest);
    store_release(flags, said.flags);
    store_release(number, said.number);
  }
  /// What is here. Its number is higher than it was before the call where a later exchange was
  /// written meanwhile.
  ExchangeLine read() const {
    ExchangeLine seen;
    seen.input = load_acquire(input);
    seen.output = load_acquire(output);
    seen.digest = load_acquire(digest);
    seen.flags = load_acquire(flags);
    seen.number = load_relaxed(number);
    return seen;
  }
};
static_assert(sizeof(ExchangeLine) == kFlagBytes);

/// One rank's lines.
struct ExchangeMemory {
  ExchangeLine entered[2];  // by number % 2
  FlagLine done;            // number of the last exchange that this rank has left
};

}  // namespace pycoll
