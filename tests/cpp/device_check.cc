// Runs every algorithm of every collective with every device protocol on teams of host threads, and
// compares bit by bit with the same program on CpuTarget, on random bits. ll128 also runs on
// threads that share lines, as the lanes of a GPU's warp do. Built plain and under sanitizers;
// `device_check few|all [ranks ...]`: the dtypes of few_kernels.cc or every one.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "algorithms/table/registry.h"
#include "device_world.h"
#include "executor/cpu/cpu_target.h"
#include "executor/device/device_program.h"
#include "kernels/threads/launch_threads.h"
#include "plan/direct_plan.h"
#include "reduce/cells.h"

namespace pycoll {
namespace {

/// What a kernel relies on in a launch; empty where all of it holds.
std::string why_not_launchable(const DeviceLaunch& launch) {
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
  } else if (launch.links.num_slots < 1 || launch.links.num_slots > kMaxSlots) {
    if (launch.protocol != DeviceProtocol::kDirect) return "1 to 8 slots";
  }
  return "";
}

constexpr int kNumChannels = 2;
constexpr int kNumThreads = 2;
constexpr int kNumLanes = 16;  // of a block whose threads share lines: two lines at a time
constexpr int64_t kSlotBytes = 1024;
// The bytes of a message in a slot, for all protocols: where a message is cut decides the order of
// some sums. kPoison has a message in one.
constexpr int64_t kPayloadBytes = kSlotBytes / 2;
constexpr int64_t kPoisonBytes = 32 << 10;
constexpr int64_t kTimeoutNs = 60'000'000'000;
constexpr uint32_t kDigest = 0x12345678;

int num_failures = 0;
int num_cases = 0;
ThreadPool pool;

void expect(bool good, const std::string& what) {
  if (good) return;
  if (num_failures++ < 10) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

struct Cell {
  DType dtype;
  Op op;
};

/// A protocol and the threads that run it.
struct Way {
  DeviceProtocol protocol;
  bool on_lanes = false;  // threads share lines
};
// kPoison is last: its messages are cut otherwise.
constexpr Way kWays[] = {{DeviceProtocol::kSimple}, {DeviceProtocol::kLL},
                         {DeviceProtocol::kLL128},  {DeviceProtocol::kLL128, true},
                         {DeviceProtocol::kDirect}, {DeviceProtocol::kPoison}};
static_assert(std::size(kWays) == kNumDeviceProtocols + 1);

/// The kernel of ll128 on lanes; null for dtypes that are not compiled for them. c128 has lines of
/// 112 bytes of payload.
ThreadKernel kernel_on_lanes(const DeviceLaunch& launch) {
  switch (launch.dtype) {
    case DType::kF32:
      return thread_kernel<DeviceProtocol::kLL128, DType::kF32, ThreadLineEnv>();
    case DType::kBF16:
      return thread_kernel<DeviceProtocol::kLL128, DType::kBF16, ThreadLineEnv>();
    case DType::kI8:
      return thread_kernel<DeviceProtocol::kLL128, DType::kI8, ThreadLineEnv>();
    case DType::kC128:
      return thread_kernel<DeviceProtocol::kLL128, DType::kC128, ThreadLineEnv>();
    default:
      return nullptr;
  }
}

/// The plans of all ranks, by rank.
struct Plans {
  Plans(const AlgorithmInfo& its_algorithm, int num_ranks) : algorithm(&its_algorithm) {
    const Schedule schedule = its_algorithm.generate(num_ranks, 0);
    for (int rank = 0; rank < num_ranks; ++rank) {
      through_slots.push_back(
          make_plan(schedule, rank, {.num_slots = 8, .multicast = false, .join_blocks = false}));
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
  bool on_lanes;

  std::string name() const {
    const char* const protocols[] = {"simple", "ll", "ll128", "poison", "direct"};
    return std::string(info(algorithm->collective).name) + " " + std::string(algorithm->name) +
           "/" + protocols[static_cast<int>(protocol)] + (on_lanes ? " on lanes " : " ") +
           std::string(dtype_name(cell.dtype)) +
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

int64_t num_blocks_of(const Case& c, int rank, int (*block_of)(const BlockAt&)) {
  const int total = num_blocks(info(c.algorithm->collective).blocks, c.num_ranks);
  int num = 0;
  for (int block = 0; block < total; ++block) {
    num = std::max(num, block_of({rank, block, c.num_ranks, 0}) + 1);
  }
  return num;
}

std::vector<Buffers> make_buffers(const Case& c, const std::vector<Plan>& plans) {
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
    for (std::byte& byte : b.bytes[0]) {
      // Every fourth byte or so has all bits set: poison must survive it.
      const uint64_t bits = random();
      byte = bits >> 62 == 0 ? std::byte{0xff} : static_cast<std::byte>(bits);
    }
  }
  return buffers;
}

void copy_blocks(Buffers& buffers, const std::vector<BlockCopy>& copies, int64_t block_bytes) {
  for (const BlockCopy& copy : copies) {
    std::memmove(buffers.at(copy.to) + copy.to_index * block_bytes,
                 buffers.at(copy.from) + copy.from_index * block_bytes,
                 static_cast<size_t>(block_bytes));
  }
}

Payload payload_of(const Case& c, Buffers& buffers) {
  Payload payload;
  for (int kind = 0; kind < kNumBuffers; ++kind) {
    payload.buffers[kind] = buffers.at(static_cast<BufferKind>(kind));
  }
  payload.count = c.count;
  payload.granule = device_granule(dtype_size(c.cell.dtype));
  return payload;
}

int64_t tile_count(const Case& c, const Plan& plan) {
  const size_t element_size = dtype_size(c.cell.dtype);
  const int64_t payload = c.protocol == DeviceProtocol::kPoison ? kPoisonBytes : kPayloadBytes;
  return device_tile_count(plan, payload, element_size);
}

/// The oracle: the same programs on one host thread per rank.
void run_host(const Case& c, const std::vector<Plan>& plans, std::vector<Buffers>& buffers) {
  const auto world = make_local_world(c.num_ranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto transport = make_local_transport(world, rank);
      Links links(transport->segment(), rank, ProtocolKind::kSimple);
      Waiter waiter(*transport);
      waiter.begin(1, kDigest, 60, {});
      CpuTarget host(transport->segment(), waiter, c.num_ranks);
      CpuArithmetic arithmetic;
      arithmetic.element_size = dtype_size(c.cell.dtype);
      arithmetic.reduce_copy = reduce_copy_fn(c.cell.dtype, c.cell.op);
      arithmetic.divisor = c.cell.op == Op::kAvg ? c.num_ranks : 1;
      host.begin(links, arithmetic);
      const Plan& plan = plans[static_cast<size_t>(rank)];
      Buffers& mine = buffers[static_cast<size_t>(rank)];
      Payload payload = payload_of(c, mine);
      payload.tile_count = tile_count(c, plan);
      const int64_t block_bytes = c.count * static_cast<int64_t>(arithmetic.element_size);
      copy_blocks(mine, plan.placement.before, block_bytes);
      interpret<Simple>(host, plan.view(), payload);
      copy_blocks(mine, plan.placement.after, block_bytes);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

/// A launch of every rank, and what it points to.
struct Launches {
  std::vector<DeviceLaunch> launches;
  std::vector<DeviceProgram> programs;
  std::vector<std::byte*> inputs;
  std::vector<std::byte*> outputs;
};

Launches make_launches(const Case& c, const std::vector<Plan>& plans, DeviceWorld& world,
                       std::vector<Buffers>& buffers) {
  Launches made;
  made.launches.resize(plans.size());
  for (const Plan& plan : plans) made.programs.push_back(device_program(plan));
  for (Buffers& mine : buffers) {
    made.inputs.push_back(mine.at(BufferKind::kInput));
    made.outputs.push_back(mine.at(BufferKind::kOutput));
  }
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    DeviceLaunch& launch = made.launches[rank];
    world.set_up(launch, static_cast<int>(rank));
    const DeviceProgram& program = made.programs[rank];
    set_program(launch, plans[rank], program, program.steps.data(), program.places.data());
    const Payload payload = payload_of(c, buffers[rank]);
    std::copy(std::begin(payload.buffers), std::end(payload.buffers), launch.buffers);
    launch.count = c.count;
    launch.tile_count = tile_count(c, plans[rank]);
    launch.granule = payload.granule;
    launch.dtype = c.cell.dtype;
    launch.op = c.cell.op;
    launch.divisor = c.cell.op == Op::kAvg ? c.num_ranks : 1;
    launch.num_threads = c.on_lanes ? kNumLanes : kNumThreads;
    launch.peer_inputs = made.inputs.data();
    launch.peer_outputs = made.outputs.data();
    launch.digest = kDigest;
    launch.timeout_ns = kTimeoutNs;
    expect(why_not_launchable(launch).empty(), c.name() + ": " + why_not_launchable(launch));
  }
  return made;
}

int64_t slot_bytes(DeviceProtocol protocol) {
  return protocol == DeviceProtocol::kPoison ? kPoisonBytes : kSlotBytes;
}

DeviceWorldShape shape_of(const Case& c, const std::vector<Plan>& plans) {
  DeviceWorldShape shape{.num_ranks = c.num_ranks,
                         .protocol = c.protocol,
                         .num_channels = kNumChannels,
                         .slot_bytes = slot_bytes(c.protocol)};
  for (const Plan& plan : plans) {
    if (c.protocol == DeviceProtocol::kPoison) {
      shape.num_slots = std::max(
          shape.num_slots, kPoisonBuffers * std::max(1, device_program(plan).max_link_messages));
    } else {
      shape.num_slots = std::max(shape.num_slots, plan.min_slots);
    }
  }
  return shape;
}

bool is_float_reduction(const Case& c) {
  return poison_allowed(c.cell.dtype, c.cell.op) &&
         c.algorithm->collective == Collective::kAllReduce && c.num_ranks > 1;
}

void run_device(const Case& c, const std::vector<Plan>& plans, const std::vector<Buffers>& initial,
                const std::vector<Buffers>& expected) {
  DeviceWorld world(shape_of(c, plans));
  // Again and again: slots wrap, and nothing is left over between launches.
  const int num_repeats = c.protocol == DeviceProtocol::kPoison ? kPoisonBuffers + 1 : 2;
  for (int repeat = 0; repeat < num_repeats && num_failures == 0; ++repeat) {
    std::vector<Buffers> buffers = initial;
    const Launches made = make_launches(c, plans, world, buffers);
    if (c.on_lanes) {
      run_blocks(made.launches.data(), c.num_ranks, pool, kernel_on_lanes);
    } else {
      launch_on_threads(made.launches.data(), c.num_ranks, pool);
    }
    for (int rank = 0; rank < c.num_ranks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      expect(world.error(rank).code == DeviceFailure::kNone, c.name() + " did not end");
      expect(buffers[r].bytes[1] == expected[r].bytes[1],
             c.name() + " rank " + std::to_string(rank) + " repeat " + std::to_string(repeat));
      expect(buffers[r].bytes[0] == expected[r].bytes[0], c.name() + " wrote its input");
    }
  }
  if (c.protocol == DeviceProtocol::kPoison) expect(world.is_poisoned(), c.name() + " poison");
}

/// One message with every protocol; the oracle is worked out once.
void run_cases(const Plans& plans, const Cell& cell, const Extent& extent) {
  Case c{plans.algorithm, plans.num_ranks(), cell, extent.count, extent.shift, {}, false};
  const std::vector<Buffers> initial = make_buffers(c, plans.through_slots);
  std::vector<Buffers> expected;
  DeviceLaunch of_dtype;
  of_dtype.dtype = cell.dtype;
  for (const auto& [protocol, on_lanes] : kWays) {
    const bool cut_alike = !expected.empty() && protocol != DeviceProtocol::kPoison;
    c.protocol = protocol;
    c.on_lanes = on_lanes;
    if (on_lanes && kernel_on_lanes(of_dtype) == nullptr) continue;
    if (plans.of(protocol).empty()) continue;
    if (protocol == DeviceProtocol::kPoison && !is_float_reduction(c)) continue;
    ++num_cases;
    if (!cut_alike) {
      expected = initial;
      run_host(c, plans.through_slots, expected);
    }
    run_device(c, plans.of(protocol), initial, expected);
  }
}

std::vector<Op> ops_of(DType dtype) {
  std::vector<Op> found;
  for (int o = 0; o < kNumOps; ++o) {
    if (supported(dtype, static_cast<Op>(o))) found.push_back(static_cast<Op>(o));
  }
  return found;
}

/// Every algorithm of `num_ranks` ranks with each of these dtypes. Ops take turns, and so do a
/// message of several tiles and one of few elements that lie anywhere.
void check_algorithms(const std::vector<DType>& dtypes, int num_ranks) {
  size_t turn = 0;
  for (const AlgorithmInfo& algorithm : algorithms()) {
    const Plans plans(algorithm, num_ranks);
    for (const DType dtype : dtypes) {
      const std::vector<Op> ops = ops_of(dtype);
      const Cell cell{dtype, ops[turn % ops.size()]};
      const int64_t many = 5 * kPayloadBytes / 2 / static_cast<int64_t>(dtype_size(dtype)) + 1;
      run_cases(plans, cell, turn % 2 == 0 ? Extent{many, 0} : Extent{num_ranks + 1, 1});
      ++turn;
    }
  }
}

/// These dtypes and every op through the paths of aligned packs, of elements, and of bytes.
void check_arithmetic(const std::vector<DType>& dtypes) {
  const Plans plans(find_algorithm(Collective::kAllReduce, "one_shot"), 3);
  for (const DType dtype : dtypes) {
    for (const Op op : ops_of(dtype)) {
      for (const int shift : {0, static_cast<int>(dtype_size(dtype)) % 16, 1}) {
        run_cases(plans, {dtype, op}, {131, shift});
      }
    }
  }
}

void check(bool all, const std::vector<int>& worlds) {
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16, DType::kI8};
  if (all) {
    dtypes.clear();
    for (int d = 0; d < kNumDTypes; ++d) dtypes.push_back(static_cast<DType>(d));
  }
  for (const int num_ranks : worlds) check_algorithms(dtypes, num_ranks);
  check_arithmetic(dtypes);
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  std::vector<int> worlds;
  for (int i = 2; i < argc; ++i) worlds.push_back(std::atoi(argv[i]));
  if (worlds.empty()) worlds = {2, 3};
  if (which != "few" && which != "all") {
    std::fprintf(stderr, "usage: device_check few|all [ranks ...]\n");
    return 2;
  }
  pycoll::check(which == "all", worlds);
  std::printf("%d cases, %d failures\n", pycoll::num_cases, pycoll::num_failures);
  return pycoll::num_failures == 0 ? 0 : 1;
}
