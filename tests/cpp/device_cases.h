// Cases of checks of device kernels: an algorithm, a dtype, an op and a message with one protocol,
// run on any device and compared bit by bit with the same program on CpuTarget, on random bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory_resource>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "algorithms/table/registry.h"
#include "device_world.h"
#include "executor/cpu/cpu_target.h"
#include "executor/device/device_program.h"
#include "plan/direct_plan.h"
#include "reduce/cells.h"

namespace pycoll {

/// What runs the launches of a case, and the memory that it reaches.
struct CaseDevice {
  virtual ~CaseDevice() = default;
  /// Runs all ranks' launches to their end. `launches` lie in `memory`, and so does all they use.
  virtual void run(std::pmr::vector<DeviceLaunch>& launches) = 0;

  std::pmr::memory_resource* memory = std::pmr::get_default_resource();
  ptrdiff_t shift = 0;  // from where the host sees the memory to where kernels see it
  int num_channels = 2;
  int num_threads = 2;
  int64_t slot_bytes = 1024;
  int64_t poison_bytes = 32 << 10;  // a slot of kPoison, which has one message in it
  int64_t timeout_ns = 60'000'000'000;

  /// Bytes of a message in a slot, for all protocols but kPoison: where a message is cut decides
  /// the order of some sums.
  int64_t payload_bytes(DeviceProtocol protocol) const {
    return protocol == DeviceProtocol::kPoison ? poison_bytes : slot_bytes / 2;
  }
  template <class T>
  T* seen_by_kernels(T* p) const {
    if (p == nullptr) return nullptr;
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(shift));
  }
};

/// What a kernel relies on in a launch; empty where all of it holds.
inline std::string why_not_launchable(const DeviceLaunch& launch) {
  if (launch.dtype == DType::kOpaque || !supported(launch.dtype, launch.op)) {
    return "no kernel for this dtype and op";
  }
  if (launch.num_channels < 1 || launch.num_channels > kMaxDeviceChannels) {
    return "1 to " + std::to_string(kMaxDeviceChannels) + " channels, not " +
           std::to_string(launch.num_channels);
  }
  if (launch.num_threads < 1 || launch.num_threads > kMaxDeviceThreads) {
    return "1 to " + std::to_string(kMaxDeviceThreads) + " threads, not " +
           std::to_string(launch.num_threads);
  }
  if (launch.num_peers < 0 || launch.num_ranks > kMaxDeviceRanks) return "too many ranks";
  if (launch.steps == nullptr && launch.num_steps > kMaxInlineSteps) {
    return "a long program's steps must lie in device memory";
  }
  if (launch.count > 0 && launch.tile_count < 1) return "an element does not fit a slot";
  if (launch.tile_count % launch.granule != 0) return "a tile is not a multiple of the granule";
  if (launch.protocol == DeviceProtocol::kPoison) {
    if (!poison_allowed(launch.dtype, launch.op)) return "this dtype has no poison";
    const int64_t tiles = (launch.count + launch.tile_count - 1) / launch.tile_count;
    if (tiles > launch.num_channels) return "poison: more tiles than channels";
  } else if (launch.links.num_slots > kMaxSlots ||
             !std::has_single_bit(static_cast<unsigned>(launch.links.num_slots))) {
    return "1, 2, 4 or 8 slots";
  }
  return "";
}

struct Cell {
  DType dtype;
  Op op;
};

inline constexpr uint32_t kCaseDigest = 0x12345678;

/// kPoison is last: its messages are cut differently.
inline constexpr DeviceProtocol kProtocols[] = {DeviceProtocol::kSimple, DeviceProtocol::kLL,
                                                DeviceProtocol::kLL128, DeviceProtocol::kDirect,
                                                DeviceProtocol::kPoison};
static_assert(std::size(kProtocols) == kNumDeviceProtocols);

/// The plans of all ranks, by rank.
struct Plans {
  Plans(const AlgorithmInfo& its_algorithm, int num_ranks) : algorithm(&its_algorithm) {
    const Schedule schedule = its_algorithm.generate(num_ranks, 0);
    for (int rank = 0; rank < num_ranks; ++rank) {
      through_slots.push_back(
          make_plan(schedule, rank,
                    {.num_slots = 8, .multicast = false, .join_blocks = false, .phases = true}));
      std::optional<DirectPlan> plan = make_direct_plan(schedule, rank);
      if (plan) direct.push_back(std::move(plan->plan));
    }
  }
  int num_ranks() const { return static_cast<int>(through_slots.size()); }
  /// Empty when there is no such way.
  const std::vector<Plan>& of(DeviceProtocol protocol) const {
    return protocol == DeviceProtocol::kDirect ? direct : through_slots;
  }

  const AlgorithmInfo* algorithm;
  std::vector<Plan> through_slots;
  std::vector<Plan> direct;
};

/// The elements of a block, and the bytes by which inputs and outputs miss their alignment.
struct Extent {
  int64_t count;
  int shift;
};

struct Case {
  const AlgorithmInfo* algorithm;
  int num_ranks;
  Cell cell;
  int64_t count;
  int shift;
  DeviceProtocol protocol;

  std::string name() const {
    const char* const protocols[] = {"simple", "ll", "ll128", "poison", "direct"};
    return std::string(info(algorithm->collective).name) + " " + std::string(algorithm->name) +
           "/" + protocols[static_cast<int>(protocol)] + " " + std::string(dtype_name(cell.dtype)) +
           " " + std::string(op_name(cell.op)) + " n=" + std::to_string(num_ranks) +
           " count=" + std::to_string(count) + " shift=" + std::to_string(shift);
  }
};

/// One rank's buffers.
struct Buffers {
  std::vector<std::byte> bytes[kNumBuffers];
  int shift = 0;
  std::byte* at(BufferKind kind) { return bytes[static_cast<int>(kind)].data() + shift; }
};

inline int64_t num_blocks_of(const Case& c, int rank, int (*block_of)(const BlockAt&)) {
  const int total = num_blocks(info(c.algorithm->collective).blocks, c.num_ranks);
  int num = 0;
  for (int block = 0; block < total; ++block) {
    num = std::max(num, block_of({rank, block, c.num_ranks, 0}) + 1);
  }
  return num;
}

inline std::vector<Buffers> make_buffers(const Case& c, const std::vector<Plan>& plans) {
  std::vector<Buffers> buffers(static_cast<size_t>(c.num_ranks));
  const CollectiveInfo& row = info(c.algorithm->collective);
  const int64_t block_bytes = c.count * static_cast<int64_t>(dtype_size(c.cell.dtype));
  std::mt19937_64 random(static_cast<uint64_t>(c.count));
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    Buffers& b = buffers[static_cast<size_t>(rank)];
    b.shift = c.shift;
    const int64_t blocks[] = {
        num_blocks_of(c, rank, row.input_block), num_blocks_of(c, rank, row.output_block),
        static_cast<int64_t>(plans[static_cast<size_t>(rank)].placement.scratch.size())};
    for (int kind = 0; kind < kNumBuffers; ++kind) {
      b.bytes[kind].resize(static_cast<size_t>(blocks[kind] * block_bytes + c.shift + 16));
    }
    uint64_t bits = 0;
    for (std::byte& byte : b.bytes[0]) {
      if (bits <= 0x3ff) bits = random();
      // Every fourth byte or so has all bits set: poison must survive it.
      byte = (bits >> 8 & 3) == 0 ? std::byte{0xff} : static_cast<std::byte>(bits);
      bits >>= 10;
    }
  }
  return buffers;
}

inline void copy_blocks(Buffers& buffers, const std::vector<BlockCopy>& copies,
                        int64_t block_bytes) {
  for (const BlockCopy& copy : copies) {
    std::memmove(buffers.at(copy.to) + copy.to_index * block_bytes,
                 buffers.at(copy.from) + copy.from_index * block_bytes,
                 static_cast<size_t>(block_bytes));
  }
}

inline Payload payload_of(const Case& c, Buffers& buffers) {
  Payload payload;
  for (int kind = 0; kind < kNumBuffers; ++kind) {
    payload.buffers[kind] = buffers.at(static_cast<BufferKind>(kind));
  }
  payload.count = c.count;
  payload.granule = device_granule(dtype_size(c.cell.dtype));
  return payload;
}

inline int64_t tile_count(const CaseDevice& device, const Case& c, const Plan& plan) {
  return device_tile_count(plan, device.payload_bytes(c.protocol), dtype_size(c.cell.dtype));
}

/// The oracle: the same programs on one host thread per rank.
inline void run_host(const CaseDevice& device, const Case& c, const std::vector<Plan>& plans,
                     std::vector<Buffers>& buffers) {
  const auto world = make_local_world(c.num_ranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto transport = make_local_transport(world, rank);
      Links links(transport->segment(), rank, ProtocolKind::kSimple);
      Waiter waiter(*transport);
      waiter.begin(1, kCaseDigest, 60, {});
      CpuTarget host(transport->segment(), waiter, c.num_ranks);
      CpuArithmetic arithmetic;
      arithmetic.element_size = dtype_size(c.cell.dtype);
      arithmetic.reduce_copy = reduce_copy_fn(c.cell.dtype, c.cell.op);
      arithmetic.divisor = c.cell.op == Op::kAvg ? c.num_ranks : 1;
      host.begin(links, arithmetic);
      const Plan& plan = plans[static_cast<size_t>(rank)];
      Buffers& mine = buffers[static_cast<size_t>(rank)];
      Payload payload = payload_of(c, mine);
      payload.tile_count = tile_count(device, c, plan);
      const int64_t block_bytes = c.count * static_cast<int64_t>(arithmetic.element_size);
      copy_blocks(mine, plan.placement.before, block_bytes);
      copy_blocks(mine, plan.placement.any_time, block_bytes);
      interpret<Simple>(host, plan.view(), payload);
      copy_blocks(mine, plan.placement.after, block_bytes);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

inline DeviceWorldShape shape_of(const CaseDevice& device, const Case& c,
                                 const std::vector<Plan>& plans) {
  const bool poison = c.protocol == DeviceProtocol::kPoison;
  DeviceWorldShape shape{.num_ranks = c.num_ranks,
                         .protocol = c.protocol,
                         .num_channels = device.num_channels,
                         .slot_bytes = poison ? device.poison_bytes : device.slot_bytes};
  for (const Plan& plan : plans) {
    if (poison) {
      shape.num_slots = std::max(
          shape.num_slots, kPoisonBuffers * std::max(1, device_program(plan).max_link_messages));
    } else {
      shape.num_slots = std::max(shape.num_slots, power_of_two(plan.min_slots));
    }
  }
  return shape;
}

/// The launches of one case on a device, again and again with fresh buffers.
class CaseLaunches {
 public:
  CaseLaunches(CaseDevice& device, const Case& c, const std::vector<Plan>& plans)
      : device_(device),
        case_(c),
        plans_(plans),
        world_(shape_of(device, c, plans), device.memory, device.shift),
        launches_(plans.size(), device.memory),
        peer_inputs_(plans.size(), device.memory),
        peer_outputs_(plans.size(), device.memory) {
    for (const Plan& plan : plans) {
      const DeviceProgram program = device_program(plan);
      programs_.push_back({{program.steps.begin(), program.steps.end(), device.memory},
                           {program.places.begin(), program.places.end(), device.memory}});
    }
  }

  /// Returns what is wrong with the results; empty: nothing.
  std::string run(const std::vector<Buffers>& initial, const std::vector<Buffers>& expected) {
    if (std::string reason = set_up(initial); !reason.empty()) return reason;
    device_.run(launches_);
    for (size_t rank = 0; rank < plans_.size(); ++rank) {
      const auto of_rank = " on rank " + std::to_string(rank);
      const DeviceError failure = error(static_cast<int>(rank));
      if (failure.code != DeviceFailure::kNone) {
        return "failure " + std::to_string(static_cast<int>(failure.code)) + of_rank +
               ", waiting for rank " + std::to_string(failure.peer) + " in step " +
               std::to_string(failure.step);
      }
      const BufferKind kinds[] = {BufferKind::kOutput, BufferKind::kInput};
      for (const BufferKind kind : kinds) {
        const auto& found = buffers_[rank][static_cast<int>(kind)];
        const auto& right = expected[rank].bytes[static_cast<int>(kind)];
        const auto at = static_cast<size_t>(
            std::mismatch(right.begin(), right.end(), found.begin()).first - right.begin());
        if (at == right.size()) continue;
        return std::string(kind == BufferKind::kInput ? "the input was written: byte "
                                                      : "wrong output: byte ") +
               std::to_string(at) + of_rank + " is " + std::to_string(static_cast<int>(found[at])) +
               ", not " + std::to_string(static_cast<int>(right[at]));
      }
    }
    if (case_.protocol == DeviceProtocol::kPoison && !world_.is_poisoned()) {
      return "a slot was left without its poison";
    }
    return "";
  }

  /// Makes the launches, with buffers of their own. Returns why no kernel can run them.
  std::string set_up(const std::vector<Buffers>& initial) {
    for (size_t rank = 0; rank < plans_.size(); ++rank) {
      if (buffers_.size() <= rank) buffers_.emplace_back(device_.memory);
      DeviceLaunch& launch = launches_[rank];
      launch = DeviceLaunch();
      world_.set_up(launch, static_cast<int>(rank));
      Program& program = programs_[rank];
      set_program(launch, plans_[rank], device_program(plans_[rank]),
                  device_.seen_by_kernels(program.steps.data()),
                  device_.seen_by_kernels(program.places.data()));
      for (int kind = 0; kind < kNumBuffers; ++kind) {
        const std::vector<std::byte>& from = initial[rank].bytes[kind];
        buffers_[rank][kind].assign(from.begin(), from.end());
        launch.buffers[kind] =
            device_.seen_by_kernels(buffers_[rank][kind].data()) + initial[rank].shift;
      }
      peer_inputs_[rank] = launch.buffers[static_cast<int>(BufferKind::kInput)];
      peer_outputs_[rank] = launch.buffers[static_cast<int>(BufferKind::kOutput)];
      launch.count = case_.count;
      launch.tile_count = tile_count(device_, case_, plans_[rank]);
      launch.granule = device_granule(dtype_size(case_.cell.dtype));
      launch.dtype = case_.cell.dtype;
      launch.op = case_.cell.op;
      launch.divisor = case_.cell.op == Op::kAvg ? case_.num_ranks : 1;
      launch.num_threads = device_.num_threads;
      launch.peer_inputs = device_.seen_by_kernels(peer_inputs_.data());
      launch.peer_outputs = device_.seen_by_kernels(peer_outputs_.data());
      launch.digest = kCaseDigest;
      launch.timeout_ns = device_.timeout_ns;
      if (std::string reason = why_not_launchable(launch); !reason.empty()) return reason;
    }
    return "";
  }

  std::pmr::vector<DeviceLaunch>& launches() { return launches_; }
  DeviceError error(int rank) const { return world_.error(rank); }

 private:
  struct Program {
    std::pmr::vector<Step> steps;
    std::pmr::vector<StepPlace> places;
  };
  struct RankBuffers {
    explicit RankBuffers(std::pmr::memory_resource* memory)
        : bytes{std::pmr::vector<std::byte>(memory), std::pmr::vector<std::byte>(memory),
                std::pmr::vector<std::byte>(memory)} {}
    std::pmr::vector<std::byte>& operator[](int kind) { return bytes[kind]; }
    std::pmr::vector<std::byte> bytes[kNumBuffers];
  };

  CaseDevice& device_;
  const Case& case_;
  const std::vector<Plan>& plans_;
  DeviceWorld world_;
  std::pmr::vector<DeviceLaunch> launches_;
  std::pmr::vector<std::byte*> peer_inputs_;
  std::pmr::vector<std::byte*> peer_outputs_;
  std::vector<Program> programs_;
  std::vector<RankBuffers> buffers_;
};

/// True where kPoison can run the case, and has a slot for each of its channels' parts.
inline bool has_poison(const CaseDevice& device, const Case& c, const Plan& plan) {
  if (!poison_allowed(c.cell.dtype, c.cell.op) || c.num_ranks == 1 ||
      c.algorithm->collective != Collective::kAllReduce) {
    return false;
  }
  const int64_t tile = tile_count(device, c, plan);
  return tile > 0 && (c.count + tile - 1) / tile <= device.num_channels;
}

/// Runs one message with every protocol; the oracle works once for all but kPoison. Calls
/// `report(case, what is wrong or empty)` for each case for which `wanted(case)`.
template <class Wanted, class Report>
void run_cases(CaseDevice& device, const Plans& plans, const Cell& cell, const Extent& extent,
               Wanted&& wanted, Report&& report) {
  Case c{plans.algorithm, plans.num_ranks(), cell, extent.count, extent.shift, {}};
  std::vector<Buffers> initial;
  std::vector<Buffers> expected;
  for (const DeviceProtocol protocol : kProtocols) {
    c.protocol = protocol;
    const bool poison = protocol == DeviceProtocol::kPoison;
    if (plans.of(protocol).empty()) continue;
    if (poison && !has_poison(device, c, plans.through_slots.front())) continue;
    if (!wanted(c)) continue;
    if (initial.empty()) initial = make_buffers(c, plans.through_slots);
    if (expected.empty() || poison) {
      expected = initial;
      run_host(device, c, plans.through_slots, expected);
    }
    // Again and again: slots wrap, and nothing is left over between launches.
    const int num_repeats = poison ? kPoisonBuffers + 1 : 2;
    CaseLaunches launches(device, c, plans.of(protocol));
    std::string wrong;
    for (int repeat = 0; repeat < num_repeats && wrong.empty(); ++repeat) {
      wrong = launches.run(initial, expected);
      if (!wrong.empty()) wrong += ", launch " + std::to_string(repeat);
    }
    report(std::as_const(c), wrong);
  }
}

inline std::vector<Op> ops_of(DType dtype) {
  std::vector<Op> found;
  for (int o = 0; o < kNumOps; ++o) {
    if (supported(dtype, static_cast<Op>(o))) found.push_back(static_cast<Op>(o));
  }
  return found;
}

}  // namespace pycoll
