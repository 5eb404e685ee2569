// What one rank's launch of one operation needs on a device: plain data, passed by value into the
// kernel's arguments. Nothing here is CUDA's: the same launch runs on host threads
// (kernels/threads/launch_threads.h) and on a GPU (kernels/cuda/launch_cuda.h).
//
// The message is cut into tiles; channel c of C, one block of the grid, moves tiles c, c + C, ...
// Between two ranks each channel of each protocol has rings of its own. Every writer pushes: slots
// and tails lie in the reader's memory, so a reader polls its own; heads (credits) lie in the
// writer's memory.
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
  kLL128,   // lines of 128 bytes, 8 of them flag; only where a line arrives whole
  kPoison,  // the payload is its own flag: floating-point all_reduce of one tile per channel
  kDirect,  // no slots: ranks read each other's inputs and write each other's outputs
};
inline constexpr int kNumDeviceProtocols = 5;

/// Ranks of a communicator with device links.
inline constexpr int kMaxDeviceRanks = kMaxPeers;
/// Blocks of one rank's launch.
inline constexpr int kMaxDeviceChannels = 128;
/// Threads of a block; on a GPU a launch has a multiple of kDeviceWarp of them.
inline constexpr int kMaxDeviceThreads = 512;
inline constexpr int kDeviceWarp = 32;
/// Slots, tails and heads start at multiples of this.
inline constexpr size_t kDeviceAlignment = 128;
/// Steps that travel inside the arguments; longer programs lie in device memory.
inline constexpr int kMaxInlineSteps = 32;
/// kPoison: calls whose messages are in memory at once.
inline constexpr int kPoisonBuffers = 3;
/// kPoison: what its slots are filled with when they are made. A NaN in every floating-point dtype,
/// and in none the one that arithmetic gives.
inline constexpr uint8_t kPoisonByte = 0xff;

/// One end of a ring. The memory starts as zeros, but kPoison's slots as kPoisonByte.
/// At the writer slots and tail lie in the peer's memory and head in its own; at the reader it is
/// the other way round. kDirect has tails alone.
struct DeviceRing {
  std::byte* slots = nullptr;
  FlagLine* tail = nullptr;
  uint64_t* head = nullptr;
};

/// Messages that this rank has written to and read from a peer on one channel. In device memory, so
/// that a graph that is replayed goes on where the last launch ended. Starts as zeros.
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
  uint64_t* epochs = nullptr;  // kPoison: calls so far, by channel; starts as zeros
  int64_t slot_bytes = 0;      // a multiple of kDeviceAlignment
  // At most kMaxSlots. kPoison: kPoisonBuffers times the most messages that a
  // program sends on one link.
  int32_t num_slots = 0;
};

/// Where a rank's buffers lie as another rank reaches them. kDirect.
struct DevicePeerBuffers {
  std::byte* input = nullptr;
  std::byte* output = nullptr;
};

enum class DeviceFailure : uint8_t {
  kNone,
  kTimeout,   // `peer` did not do its part before the deadline
  kMismatch,  // a message from `peer` carried another digest
  kAborted,   // the abort word was set
};

/// Why a launch ended early. One word, so that whoever reads it sees all of it.
struct DeviceError {
  DeviceFailure code = DeviceFailure::kNone;
  uint8_t for_credit = 0;  // waited for a free slot rather than for a full one
  uint16_t rank = 0;       // that reports
  uint16_t peer = 0;       // that was waited for
  uint8_t step = 0;        // of the program; 255: 255 or more
  uint8_t channel = 0;
};
static_assert(sizeof(DeviceError) == sizeof(uint64_t));

/// In mapped pinned memory of the host. One per rank and communicator.
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
  // --- the message
  std::byte* buffers[kNumBuffers] = {};  // by BufferKind
  int64_t count = 0;                     // elements of a block, of the largest one
  int64_t tile_count = 0;                // elements of a block in one tile (device_tile_count)
  // In device memory, or null; as in Message.
  const int64_t* block_counts = nullptr;
  const int64_t* starts[kNumBuffers] = {};
  // --- arithmetic. Elements of no known dtype travel as kU8, counted in bytes
  DType dtype = DType::kF32;
  Op op = Op::kSum;
  DeviceProtocol protocol = DeviceProtocol::kSimple;
  int32_t granule = 1;  // elements: tiles are cut at multiples of it (device_granule)
  int64_t divisor = 1;  // of kFinal steps
  // --- the team
  int32_t num_channels = 1;  // blocks; alike on all ranks
  int32_t num_threads = 0;   // of a block
  // --- memory
  DeviceLinks links;  // of `protocol`
  // kDirect: by rank, in device memory; a call's buffers start so many bytes behind them.
  const DevicePeerBuffers* peer_buffers = nullptr;
  int64_t input_offset = 0;
  int64_t output_offset = 0;
  // --- failure
  uint64_t operation = 0;                // its number, for messages
  uint32_t digest = 0;                   // of the call; compared with the peers'
  int64_t timeout_ns = 0;                // from the start of the kernel, by the device's clock
  const uint64_t* abort_word = nullptr;  // mapped pinned host memory: not 0 ends all waits
  DeviceReport* report = nullptr;        // mapped pinned host memory
  uint64_t* failed = nullptr;  // device memory, one word per rank and communicator: 0, or failed
  // --- tables that end the arguments
  int32_t peers[kMaxDeviceRanks] = {};  // ascending absolute ranks
  Step inline_steps[kMaxInlineSteps] = {};
  StepPlace inline_places[kMaxInlineSteps] = {};
};
static_assert(sizeof(DeviceLaunch) <= 3072, "kernel arguments: mind the cost of a launch");

}  // namespace pycoll
