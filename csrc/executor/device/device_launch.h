// The data that a device needs for one rank's launch of one operation: plain data, passed by value
// as the kernel's arguments. Nothing here depends on CUDA: the same launch runs on CPU threads
// (kernels/threads/launch_threads.h) and on a GPU (kernels/cuda/launch_cuda.h).
//
// The payload is cut into tiles; channel c of C, one block of the grid, moves tiles c, c + C, ...
// Each channel of each protocol has its own rings between two ranks. Writers push: slots and tails
// lie in the reader's memory, so a reader polls local memory; heads (credits) lie in the writer's
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/dtypes.h"
#include "reduce/ops.h"
#include "schedule/step.h"
#include "transport/ring/slot.h"

namespace pycoll {

/// How bytes and flags travel on a device.
enum class DeviceProtocol : uint8_t {
  kSimple,  // bulk bytes, then one flag
  kLL,      // 8-byte words of 4 bytes of payload and 4 of flag
  kLL128,   // lines of 128 bytes with a flag of 8; only where a line arrives as a whole
  kPoison,  // the payload is its own flag: floating-point all_reduce of one tile per channel
  kDirect,  // no slots: ranks read each other's inputs and write each other's outputs
};
inline constexpr int kNumDeviceProtocols = 5;

/// Maximum number of ranks of a communicator with device links.
inline constexpr int kMaxDeviceRanks = kMaxPeers;
/// Maximum number of blocks of one rank's launch.
inline constexpr int kMaxDeviceChannels = 128;
/// Maximum number of threads of a block; on a GPU a multiple of kDeviceWarp.
inline constexpr int kMaxDeviceThreads = 512;
inline constexpr int kDeviceWarp = 32;
/// Slots, tails and heads start at multiples of this.
inline constexpr size_t kDeviceAlignment = 128;
/// Maximum number of steps inside the arguments; longer programs lie in device memory.
inline constexpr int kMaxInlineSteps = 32;
/// kPoison: number of calls whose messages are in memory at the same time.
inline constexpr int kPoisonBuffers = 3;
/// kPoison: the initial fill of its slots. It is a NaN in every floating-point dtype, and in none
/// of them the NaN that arithmetic produces.
inline constexpr uint8_t kPoisonByte = 0xff;

/// One end of a ring. The memory starts as zeros, kPoison's slots as kPoisonByte.
/// At the writer, slots and tail lie in the peer's memory and head in its own; at the reader it is
/// the reverse. kDirect has only tails.
struct DeviceRing {
  std::byte* slots = nullptr;
  FlagLine* tail = nullptr;
  uint64_t* head = nullptr;
};

/// Counts of the messages that this rank has written to and read from a peer on one channel. They
/// lie in device memory, so that a replayed graph continues from the last launch. Starts as zeros.
struct DeviceRingState {
  uint64_t posted = 0;
  uint64_t released = 0;
  uint64_t credit = 0;  // the head that this rank has last seen as the writer
  uint64_t reserved = 0;
};

/// This rank's ends of all rings of one protocol. The tables lie in device memory, at
/// [channel * num_ranks + peer].
struct DeviceLinks {
  const DeviceRing* send = nullptr;
  const DeviceRing* recv = nullptr;
  DeviceRingState* states = nullptr;
  // By channel: twice the number of finished calls, plus 1 during a call. Starts as zeros.
  uint64_t* epochs = nullptr;
  int64_t slot_bytes = 0;  // a multiple of kDeviceAlignment
  // A power of two, at most kMaxSlots. kPoison: kPoisonBuffers times the most messages that a
  // program sends on one link.
  int32_t num_slots = 0;
};

enum class DeviceFailure : uint8_t {
  kNone,
  kTimeout,   // `peer` did not do its part before the deadline
  kMismatch,  // a message from `peer` carried another digest
  kAborted,   // the abort word was set
  kOverlap,   // another operation of the rank was under way
};

/// Why a launch ended early. One word, so that a reader sees all of it or nothing.
struct DeviceError {
  DeviceFailure code = DeviceFailure::kNone;
  uint8_t for_credit = 0;  // waited for a free slot rather than for a full one
  uint16_t rank = 0;       // reporting rank
  uint16_t peer = 0;       // rank that was waited for
  uint8_t step = 0;        // of the program; 255 stands for 255 or more
  uint8_t channel = 0;
};
static_assert(sizeof(DeviceError) == sizeof(uint64_t));

/// Failure report in mapped pinned memory of the host. One per rank and communicator.
struct alignas(kFlagBytes) DeviceReport {
  uint64_t error = 0;      // a DeviceError; stored last, with release. Never cleared by a kernel
  uint64_t operation = 0;  // DeviceLaunch::operation of the launch that failed
};

struct DeviceLaunch {
  // --- the program: inline, or in device memory where `steps` is set
  const Step* steps = nullptr;
  const StepPlace* places = nullptr;
  int32_t num_steps = 0;
  int32_t num_pieces = 1;
  int32_t num_peers = 0;
  int32_t self_position = 0;
  int32_t rank = 0;
  int32_t num_ranks = 1;
  // --- the payload
  std::byte* buffers[kNumBuffers] = {};  // by BufferKind
  int64_t count = 0;                     // elements of a block; of the largest one
  int64_t tile_count = 0;                // elements of a block in one tile (device_tile_count)
  // In device memory, or null; see Message.
  const int64_t* block_counts = nullptr;
  const int64_t* starts[kNumBuffers] = {};
  // --- arithmetic. Elements of an unknown dtype travel as kU8, counted in bytes
  DType dtype = DType::kF32;
  Op op = Op::kSum;
  DeviceProtocol protocol = DeviceProtocol::kSimple;
  int32_t granule = 1;  // elements; each tile starts at a multiple of it (device_granule)
  int64_t divisor = 1;  // of kFinal steps
  // --- the team
  int32_t num_channels = 1;  // blocks; equal on all ranks
  int32_t num_threads = 0;   // of a block
  // --- memory
  DeviceLinks links;  // of `protocol`
  // kDirect: where this rank's kernels reach the ranks' arrays, by rank, in device memory. The
  // call's buffers start at the offsets below.
  std::byte* const* peer_inputs = nullptr;
  std::byte* const* peer_outputs = nullptr;
  int64_t input_offset = 0;
  int64_t output_offset = 0;
  int32_t waits_in_stream = 0;  // kDirect: 1: the stream waits for the peers, not the kernel
  // --- failure
  uint64_t operation = 0;                // its number, for error messages
  uint32_t digest = 0;                   // of the call; compared with the peers'
  int64_t timeout_ns = 0;                // from the start of the kernel, by the device's clock
  const uint64_t* abort_word = nullptr;  // mapped pinned CPU memory: not 0 ends all waits
  DeviceReport* report = nullptr;        // mapped pinned CPU memory
  uint64_t* failed = nullptr;  // device memory, one word per rank and communicator; not 0: failed
  // --- tables at the end of the arguments
  int32_t peers[kMaxDeviceRanks] = {};  // ascending absolute ranks
  Step inline_steps[kMaxInlineSteps] = {};
  StepPlace inline_places[kMaxInlineSteps] = {};
};
static_assert(sizeof(DeviceLaunch) <= 3072, "kernel arguments: mind the cost of a launch");

}  // namespace pycoll
