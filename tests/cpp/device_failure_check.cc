// What device launches do when something is wrong: a peer that never comes, an abort, another call
// at the other end, a launch beside another one, a device without room; and what is worn out by
// many messages: the flags of ll. Built plain and under sanitizers. Only f32 and all of it compiled
// here, so that tests compile it again with a check taken away.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "all_reduce_launches.h"
#include "kernels/threads/thread_blocks.h"

namespace pycoll {
namespace {

constexpr int kNumRanks = 2;
constexpr uint64_t kOperation = 412;
constexpr int64_t kSlotBytes = 1024;
constexpr int64_t kShortNs = 2'000'000'000;  // of waits that end before, where all is well
constexpr unsigned kHangS = 100;             // the whole program takes a tenth of it

int num_failures = 0;
int num_cases = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  if (num_failures++ < 10) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

/// A protocol and the threads that run it.
struct Way {
  DeviceProtocol protocol;
  bool on_lanes = false;  // threads share lines

  std::string name() const {
    return "protocol " + std::to_string(static_cast<int>(protocol)) + (on_lanes ? " on lanes" : "");
  }
  AllReduceShape shape() const {
    return {.protocol = protocol,
            .num_threads = on_lanes ? 2 * ThreadLine::kLanes : 3,
            .num_channels = 2,
            .slot_bytes = kSlotBytes};
  }
};
constexpr Way kWays[] = {{DeviceProtocol::kSimple}, {DeviceProtocol::kLL},
                         {DeviceProtocol::kLL128},  {DeviceProtocol::kLL128, true},
                         {DeviceProtocol::kPoison}, {DeviceProtocol::kDirect}};
static_assert(std::size(kWays) == kNumDeviceProtocols + 1);

/// Blocks of this many threads share lines.
bool is_on_lanes(const DeviceLaunch& launch) { return launch.num_threads >= ThreadLine::kLanes; }

ThreadKernel kernel_of(const DeviceLaunch& launch) {
  switch (launch.protocol) {
    case DeviceProtocol::kSimple:
      return thread_kernel<DeviceProtocol::kSimple, DType::kF32>();
    case DeviceProtocol::kLL:
      return thread_kernel<DeviceProtocol::kLL, DType::kF32>();
    case DeviceProtocol::kLL128:
      return is_on_lanes(launch)
                 ? thread_kernel<DeviceProtocol::kLL128, DType::kF32, ThreadLineEnv>()
                 : thread_kernel<DeviceProtocol::kLL128, DType::kF32>();
    case DeviceProtocol::kPoison:
      return thread_kernel<DeviceProtocol::kPoison, DType::kF32>();
    case DeviceProtocol::kDirect:
      return thread_kernel<DeviceProtocol::kDirect, DType::kF32>();
  }
  return nullptr;
}

/// An all_reduce of two ranks, ready to be launched.
class Operation {
 public:
  explicit Operation(const AllReduceShape& shape) : all_(shape) {
    for (DeviceLaunch& launch : all_.launches()) {
      launch.operation = kOperation;
      launch.tile_count = 32;
    }
  }
  DeviceLaunch& launch(int rank) { return all_.launches()[static_cast<size_t>(rank)]; }
  DeviceWorld& world() { return all_.world(); }
  void run(int num_ranks = kNumRanks) {
    run_blocks(all_.launches().data(), num_ranks, pool_, kernel_of);
  }
  void run_rank(int rank) {
    ThreadPool pool;
    run_blocks(&launch(rank), 1, pool, kernel_of);
  }
  /// Whether the sums of so many elements of that round are right. Rank 0 comes `late_ms` later.
  bool adds_up(int64_t count, int64_t tile_count, int round, int late_ms = 0) {
    all_.fill(round);
    for (DeviceLaunch& launch : all_.launches()) {
      launch.count = count;
      launch.tile_count = tile_count;
    }
    std::thread other([this] { run_rank(1); });
    std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
    run_rank(0);
    other.join();
    return all_.take_sums(round);
  }

 private:
  ThreadPool pool_;
  AllReduceLaunches all_;
};

void check_report(Operation& operation, int rank, DeviceFailure code, const std::string& what) {
  const DeviceError error = operation.world().error(rank);
  expect(error.code == code, what + ": code " + std::to_string(static_cast<int>(error.code)));
  expect(error.rank == rank && error.peer == 1 - rank, what + ": ranks");
  expect(error.channel < 2, what + ": channel");
  expect(operation.world().failed_operation(rank) == kOperation, what + ": operation");
}

void check_timeout(const Way& way) {
  ++num_cases;
  Operation operation(way.shape());
  operation.launch(0).timeout_ns = 50'000'000;
  operation.run(1);  // rank 1 never comes
  check_report(operation, 0, DeviceFailure::kTimeout, way.name() + " timeout");
}

/// A launch behind one that failed, with whatever protocol, sends nothing.
void check_behind_failure(const Way& way) {
  ++num_cases;
  Operation operation(way.shape());
  *operation.launch(0).failed = 1;
  operation.run(1);
  operation.launch(1).timeout_ns = 50'000'000;
  operation.run_rank(1);
  check_report(operation, 1, DeviceFailure::kTimeout, way.name() + " behind a failed launch");
}

void check_abort(const Way& way) {
  ++num_cases;
  Operation operation(way.shape());
  operation.launch(0).timeout_ns = kShortNs;
  std::thread aborts([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic_ref<uint64_t>(operation.world().abort_word()).store(1);
  });
  operation.run(1);
  aborts.join();
  check_report(operation, 0, DeviceFailure::kAborted, way.name() + " abort");
}

void check_mismatch(const Way& way) {
  ++num_cases;
  Operation operation(way.shape());
  operation.launch(1).digest ^= 0x1010;
  for (int rank = 0; rank < kNumRanks; ++rank) operation.launch(rank).timeout_ns = 5 * kShortNs;
  const int64_t began_ns = now_ns();
  operation.run();
  // All threads end when the first one has found it, not at the deadline.
  expect(now_ns() - began_ns < 5 * kShortNs, way.name() + " mismatch: late");
  for (int rank = 0; rank < kNumRanks; ++rank) {
    check_report(operation, rank, DeviceFailure::kMismatch, way.name() + " mismatch");
  }
}

/// Launches of both ranks on a device that holds `num_blocks` blocks: each rank has two.
void run_on_device(Operation& operation, int num_blocks, bool together) {
  ThreadProcessors processors(num_blocks);
  const BlockStart start{processors, together, [] {}};
  ThreadPool pools[kNumRanks];
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    ranks.emplace_back(
        [&, rank] { run_blocks(&operation.launch(rank), 1, pools[rank], kernel_of, &start); });
  }
  for (std::thread& rank : ranks) rank.join();
}

/// A block that is not resident keeps those waiting that are, until their deadline.
void check_residency() {
  for (const int num_blocks : {2, 4}) {
    for (const bool together : {false, true}) {
      ++num_cases;
      Operation operation(kWays[0].shape());
      for (int rank = 0; rank < kNumRanks; ++rank) operation.launch(rank).timeout_ns = 500'000'000;
      run_on_device(operation, num_blocks, together);
      bool gave_up = false;
      for (int rank = 0; rank < kNumRanks; ++rank) {
        gave_up = gave_up || operation.world().error(rank).code == DeviceFailure::kTimeout;
      }
      expect(gave_up == (num_blocks < 4), "room for " + std::to_string(num_blocks) + " blocks");
    }
  }
}

/// A launch that begins while another one of its rank waits: both end, and the second says why.
void check_overlap(const Way& way) {
  ++num_cases;
  Operation operation(way.shape());
  operation.launch(0).timeout_ns = kShortNs;
  ThreadPool first;
  std::thread waits([&] { run_blocks(&operation.launch(0), 1, first, kernel_of); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  operation.run(1);
  waits.join();
  const DeviceError error = operation.world().error(0);
  expect(error.code == DeviceFailure::kOverlap, way.name() + " overlap");
}

/// The numbers in ll's flags repeat after 65,536 messages: lines that short messages have not
/// touched since must not be taken for new ones.
void check_low_latency_flags_repeat() {
  ++num_cases;
  constexpr int64_t kMany = 4 * ((1 << 16) - 1);
  Operation operation({.protocol = DeviceProtocol::kLL,
                       .count = kMany,
                       .num_threads = 1,
                       .slot_bytes = kSlotBytes});
  expect(operation.adds_up(128, 128, 0), "ll before its flags repeat");
  expect(operation.adds_up(kMany, 4, 1), "ll with many messages");
  // More threads: some begin with lines that only the first message has written.
  for (int rank = 0; rank < kNumRanks; ++rank) operation.launch(rank).num_threads = 4;
  expect(operation.adds_up(128, 128, 2, 50), "ll after its flags repeated");
}

void check() {
  for (const Way& way : kWays) {
    check_timeout(way);
    check_behind_failure(way);
    check_abort(way);
    check_mismatch(way);
    check_overlap(way);
  }
  check_residency();
  check_low_latency_flags_repeat();
}

}  // namespace
}  // namespace pycoll

int main() {
  alarm(pycoll::kHangS);
  pycoll::check();
  std::printf("%d cases, %d failures\n", pycoll::num_cases, pycoll::num_failures);
  return pycoll::num_failures == 0 ? 0 : 1;
}
