// What orders bytes and flags between blocks: a few all_reduces over and over, with one protocol.
// Only f32 and all of it compiled here, so that tests compile it again with an order taken away.
// `device_order_check simple|ll|ll128|poison|direct`.
#include <atomic>
#include <cstdio>
#include <string_view>
#include <thread>
#include <vector>

#include "algorithms/table/registry.h"
#include "device_world.h"
#include "executor/device/device_program.h"
#include "kernels/threads/thread_blocks.h"
#include "plan/direct_plan.h"

namespace pycoll {
namespace {

constexpr int kNumRanks = 3;
constexpr int kNumThreads = 2;
constexpr int64_t kSlotBytes = 256;
constexpr int kNumRounds = 24;

/// Elements of a block. Several tiles per channel, so that slots are used again within a launch;
/// poison has one tile per channel.
int64_t count_of(DeviceProtocol protocol) { return protocol == DeviceProtocol::kPoison ? 48 : 600; }

float value(int rank, int64_t i, int round) {
  return static_cast<float>((rank + 1) * (round + 1) + static_cast<int>(i % 7));
}

template <DeviceProtocol protocol>
ThreadKernel kernel_of(const DeviceLaunch&) {
  return thread_kernel<protocol, DType::kF32>();
}

/// All ranks' parts of one algorithm.
struct Ranks {
  std::vector<Plan> plans;
  std::vector<DeviceProgram> programs;
  int num_slots = 2;
  std::vector<float> input[kNumRanks];
  std::vector<float> output[kNumRanks];
  std::vector<DevicePeerBuffers> peer_buffers;
};

template <DeviceProtocol protocol>
Ranks make_ranks(const char* algorithm) {
  Ranks ranks;
  const Schedule schedule =
      find_algorithm(Collective::kAllReduce, algorithm).generate(kNumRanks, 0);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    Plan plan = make_plan(schedule, rank, {.num_slots = 8, .multicast = false});
    if (protocol == DeviceProtocol::kDirect) {
      std::optional<DirectPlan> direct = make_direct_plan(schedule, rank);
      if (!direct) return {};
      plan = std::move(direct->plan);
    }
    ranks.programs.push_back(device_program(plan));
    ranks.num_slots =
        std::max(ranks.num_slots, protocol == DeviceProtocol::kPoison
                                      ? kPoisonBuffers * ranks.programs.back().max_link_messages
                                      : plan.min_slots);
    ranks.plans.push_back(std::move(plan));
    ranks.input[rank].resize(static_cast<size_t>(count_of(protocol)));
    ranks.output[rank].resize(ranks.input[rank].size());
    ranks.peer_buffers.push_back({reinterpret_cast<std::byte*>(ranks.input[rank].data()),
                                  reinterpret_cast<std::byte*>(ranks.output[rank].data())});
  }
  return ranks;
}

/// One rank's calls, one after another: nothing but the protocol holds it back.
template <DeviceProtocol protocol>
int run_rank(Ranks& ranks, DeviceWorld& world, int rank) {
  const auto r = static_cast<size_t>(rank);
  const Plan& plan = ranks.plans[r];
  const DeviceProgram& program = ranks.programs[r];
  const int64_t count = count_of(protocol);
  std::vector<float> scratch(static_cast<size_t>(count) * kNumRanks);
  DeviceLaunch launch;
  world.set_up(launch, rank);
  set_program(launch, plan, program, program.steps.data(), program.places.data());
  launch.buffers[0] = ranks.peer_buffers[r].input;
  launch.buffers[1] = ranks.peer_buffers[r].output;
  launch.buffers[2] = reinterpret_cast<std::byte*>(scratch.data());
  launch.count = count;
  launch.granule = device_granule(sizeof(float));
  launch.tile_count = device_tile_count(
      plan, device_payload_bytes(protocol, kSlotBytes, sizeof(float)), sizeof(float));
  launch.num_threads = kNumThreads;
  launch.peer_buffers = ranks.peer_buffers.data();
  launch.digest = 0x1234567;
  launch.timeout_ns = 5'000'000'000;
  ThreadPool pool;
  int num_failures = 0;
  for (int round = 0; round < kNumRounds; ++round) {
    for (int64_t i = 0; i < count; ++i) {
      ranks.input[rank][static_cast<size_t>(i)] = value(rank, i, round);
    }
    run_blocks(&launch, 1, pool, kernel_of<protocol>);
    if (world.error(rank).code != DeviceFailure::kNone) return 1;
    for (int64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int from = 0; from < kNumRanks; ++from) sum += value(from, i, round);
      if (ranks.output[rank][static_cast<size_t>(i)] != sum) ++num_failures;
    }
  }
  return num_failures;
}

template <DeviceProtocol protocol>
int check(const char* algorithm) {
  Ranks ranks = make_ranks<protocol>(algorithm);
  if (ranks.plans.empty()) return 0;  // there is no such way
  DeviceWorld world({.num_ranks = kNumRanks,
                     .protocol = protocol,
                     .num_channels = 2,
                     .slot_bytes = kSlotBytes,
                     .num_slots = ranks.num_slots});
  std::atomic<int> num_failures{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&, rank] { num_failures += run_rank<protocol>(ranks, world, rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return num_failures;
}

template <DeviceProtocol protocol>
int check_all() {
  return check<protocol>("one_shot") + check<protocol>("two_shot") + check<protocol>("ring");
}

int check_named(std::string_view protocol) {
  if (protocol == "simple") return check_all<DeviceProtocol::kSimple>();
  if (protocol == "ll") return check_all<DeviceProtocol::kLL>();
  if (protocol == "ll128") return check_all<DeviceProtocol::kLL128>();
  if (protocol == "poison") return check_all<DeviceProtocol::kPoison>();
  if (protocol == "direct") return check_all<DeviceProtocol::kDirect>();
  std::fprintf(stderr, "usage: device_order_check simple|ll|ll128|poison|direct\n");
  return 1;
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  const int num_failures = pycoll::check_named(argc > 1 ? argv[1] : "");
  std::printf("%s, %d failures\n", argv[argc - 1], num_failures);
  return num_failures == 0 ? 0 : 1;
}
