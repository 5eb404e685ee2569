// Runs every algorithm of every collective with every device protocol on teams of host threads, and
// compares bit by bit with the same program on HostThread, on random bits. Built plain and under
// sanitizers; `device_check few|all [n ...]`: few or all cells of dtypes and ops.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "algorithms/registry.h"
#include "device_world.h"
#include "executor/device_program.h"
#include "executor/host.h"
#include "kernels/launch_threads.h"
#include "plan/direct.h"
#include "reduce/cells.h"

namespace pycoll {
namespace {

constexpr int64_t kTimeoutNs = 60'000'000'000;
constexpr uint32_t kDigest = 0x12345678;

int num_failures = 0;
int num_cases = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  if (num_failures++ < 10) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

struct Cell {
  DType dtype;
  Op op;
};

struct Case {
  const AlgorithmInfo* algorithm;
  DeviceProtocol protocol;
  Cell cell;
  int num_ranks;
  int64_t count;
  int shift;  // bytes by which inputs and outputs miss their alignment
  int num_threads;

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

Message message_of(const Case& c, Buffers& buffers) {
  Message message;
  for (int kind = 0; kind < kNumBuffers; ++kind) {
    message.buffers[kind] = buffers.at(static_cast<BufferKind>(kind));
  }
  message.count = c.count;
  message.granule = device_granule(dtype_size(c.cell.dtype));
  return message;
}

/// The oracle: the same programs on one host thread per rank.
void run_host(const Case& c, const std::vector<Plan>& plans, int64_t tile_count,
              std::vector<Buffers>& buffers) {
  const auto world = make_local_world(c.num_ranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto transport = make_local_transport(world, rank);
      Links links(transport->segment(), rank, ProtocolKind::kSimple);
      Waiter waiter(*transport);
      waiter.begin(1, kDigest, 60, {});
      HostThread host(transport->segment(), waiter, c.num_ranks);
      HostArithmetic arithmetic;
      arithmetic.element_size = dtype_size(c.cell.dtype);
      arithmetic.reduce_copy = reduce_copy_fn(c.cell.dtype, c.cell.op);
      arithmetic.divisor = c.cell.op == Op::kAvg ? c.num_ranks : 1;
      host.begin(links, arithmetic);
      const Plan& plan = plans[static_cast<size_t>(rank)];
      Buffers& mine = buffers[static_cast<size_t>(rank)];
      Message message = message_of(c, mine);
      message.tile_count = tile_count;
      const int64_t block_bytes = c.count * static_cast<int64_t>(arithmetic.element_size);
      copy_blocks(mine, plan.placement.before, block_bytes);
      interpret<Simple>(host, plan.view(), message);
      copy_blocks(mine, plan.placement.after, block_bytes);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

/// A launch of every rank, and what it points to.
struct Launches {
  std::vector<DeviceLaunch> launches;
  std::vector<DeviceProgram> programs;
  std::vector<DevicePeerBuffers> peer_buffers;
};

Launches make_launches(const Case& c, const std::vector<Plan>& plans, DeviceWorld& world,
                       int64_t tile_count, std::vector<Buffers>& buffers) {
  Launches made;
  made.launches.resize(plans.size());
  for (const Plan& plan : plans) made.programs.push_back(device_program(plan));
  for (Buffers& mine : buffers) {
    made.peer_buffers.push_back({mine.at(BufferKind::kInput), mine.at(BufferKind::kOutput)});
  }
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    DeviceLaunch& launch = made.launches[rank];
    world.set_up(launch, static_cast<int>(rank));
    const DeviceProgram& program = made.programs[rank];
    set_program(launch, plans[rank], program, program.steps.data(), program.places.data());
    const Message message = message_of(c, buffers[rank]);
    std::copy(std::begin(message.buffers), std::end(message.buffers), launch.buffers);
    launch.count = c.count;
    launch.tile_count = tile_count;
    launch.granule = message.granule;
    launch.dtype = c.cell.dtype;
    launch.op = c.cell.op;
    launch.divisor = c.cell.op == Op::kAvg ? c.num_ranks : 1;
    launch.num_threads = c.num_threads;
    launch.peer_buffers = made.peer_buffers.data();
    launch.digest = kDigest;
    launch.timeout_ns = kTimeoutNs;
    expect(why_not_launchable(launch).empty(), c.name() + ": " + why_not_launchable(launch));
  }
  return made;
}

DeviceWorldShape shape_of(const Case& c, const std::vector<Plan>& plans) {
  DeviceWorldShape shape{.num_ranks = c.num_ranks, .protocol = c.protocol};
  for (const Plan& plan : plans) {
    if (c.protocol == DeviceProtocol::kPoison) {
      shape.slot_bytes = 32 << 10;
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

void run_case(const Case& c) {
  if (c.protocol == DeviceProtocol::kPoison && !is_float_reduction(c)) return;
  const Schedule schedule = c.algorithm->generate(c.num_ranks, 0);
  std::vector<Plan> plans;
  std::vector<Plan> host_plans;
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    host_plans.push_back(
        make_plan(schedule, rank, {.num_slots = 8, .multicast = false, .join_blocks = false}));
    if (c.protocol == DeviceProtocol::kDirect) {
      std::optional<DirectPlan> direct = make_direct_plan(schedule, rank);
      if (!direct) return;
      plans.push_back(std::move(direct->plan));
    } else {
      plans.push_back(host_plans.back());
    }
  }
  ++num_cases;
  const size_t element_size = dtype_size(c.cell.dtype);
  DeviceWorld world(shape_of(c, plans));
  const int64_t payload = device_payload_bytes(c.protocol, world.shape().slot_bytes, element_size);
  const int64_t tile_count = device_tile_count(host_plans.front(), payload, element_size);
  std::vector<Buffers> expected = make_buffers(c, host_plans);
  run_host(c, host_plans, tile_count, expected);
  // Again and again: slots wrap, and nothing is left over between launches.
  for (int repeat = 0; repeat < 4; ++repeat) {
    std::vector<Buffers> buffers = make_buffers(c, host_plans);
    const Launches made = make_launches(c, plans, world, tile_count, buffers);
    launch_on_threads(made.launches.data(), c.num_ranks);
    for (int rank = 0; rank < c.num_ranks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      expect(world.error(rank).code == DeviceFailure::kNone, c.name() + " did not end");
      expect(buffers[r].bytes[1] == expected[r].bytes[1],
             c.name() + " rank " + std::to_string(rank) + " repeat " + std::to_string(repeat));
      expect(buffers[r].bytes[0] == expected[r].bytes[0], c.name() + " wrote its input");
    }
    if (num_failures > 0) return;
  }
  if (c.protocol == DeviceProtocol::kPoison) expect(world.is_poisoned(), c.name() + " poison");
}

constexpr DeviceProtocol kProtocols[] = {DeviceProtocol::kSimple, DeviceProtocol::kLL,
                                         DeviceProtocol::kLL128, DeviceProtocol::kPoison,
                                         DeviceProtocol::kDirect};
static_assert(std::size(kProtocols) == kNumDeviceProtocols);

std::vector<Cell> cells(bool all) {
  if (!all) return {{DType::kF32, Op::kSum}, {DType::kBF16, Op::kAvg}};
  std::vector<Cell> found;
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int o = 0; o < kNumOps; ++o) {
      const Cell cell{static_cast<DType>(d), static_cast<Op>(o)};
      if (supported(cell.dtype, cell.op)) found.push_back(cell);
    }
  }
  return found;
}

void check(bool all, const std::vector<int>& worlds) {
  const std::vector<Cell> every_cell = cells(true);
  size_t next_cell = 0;
  for (const int n : worlds) {
    for (const AlgorithmInfo& algorithm : algorithms()) {
      for (const DeviceProtocol protocol : kProtocols) {
        for (const Cell cell : cells(all)) {
          // Who copies only needs no more than one cell, and takes turns.
          const bool has_op = info(algorithm.collective).has_op;
          if (!has_op && cell.dtype != DType::kF32 && !all) continue;
          const bool fixed = all || (has_op && cell.dtype == DType::kF32);
          const Cell used = fixed ? cell : every_cell[next_cell++ % every_cell.size()];
          for (const int64_t count : {int64_t{1}, int64_t{n + 1}, int64_t{613}}) {
            if (!all && count == 1) continue;
            const int shift = count == n + 1 ? 1 : 0;
            run_case({&algorithm, protocol, used, n, count, shift, count == 613 ? 3 : 2});
          }
        }
      }
    }
  }
  // Every cell through the paths of aligned packs, of elements, and of bytes.
  const AlgorithmInfo& one_shot = find_algorithm(Collective::kAllReduce, "one_shot");
  for (const Cell cell : every_cell) {
    for (const DeviceProtocol protocol : kProtocols) {
      const int size = static_cast<int>(dtype_size(cell.dtype));
      for (const int shift : {0, size % 16, 1}) {
        // Few: the two ways through the arithmetic, and no path that only alignment chooses.
        if (!all && protocol != DeviceProtocol::kSimple && protocol != DeviceProtocol::kLL)
          continue;
        if (!all && shift != 0 && protocol != DeviceProtocol::kSimple) continue;
        run_case({&one_shot, protocol, cell, 3, 131, shift, 2});
      }
    }
  }
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
