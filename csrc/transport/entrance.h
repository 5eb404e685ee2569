// What ranks tell each other when they enter an operation on each other's buffers, and when they
// are done with them. One flight of one cache line each.
//
// Entrances are numbered alike on all ranks. A rank that has seen everyone's entrance k-1 knows
// that all are done reading entrance k-2, so two lines per rank suffice.
#pragma once

#include <cstdint>

#include "transport/slot.h"

namespace pycoll {

enum EntranceFlags : uint32_t {
  kMappedBuffers = 1,   // no buffer of the rank is elsewhere than in memory that all ranks map
  kProcessBuffers = 2,  // no buffer of the rank is in such memory
  kInPlace = 4,         // input and output are the same memory
  kReadsProcesses = 8,  // this rank has read the memory of all peers' processes
  kNoHeap = 16,         // this rank cannot reach the heap
};

struct alignas(kFlagBytes) EntranceLine {
  uint64_t number = 0;  // written last
  uint64_t input = 0;   // an offset into the heap with kMappedBuffers, else an address
  uint64_t output = 0;
  uint32_t digest = 0;
  uint32_t flags = 0;
};
static_assert(sizeof(EntranceLine) == kFlagBytes);

/// One rank's lines.
struct EntranceMemory {
  EntranceLine entered[2];  // by number % 2
  FlagLine done;            // number of the last entrance that this rank has left
};

}  // namespace pycoll
