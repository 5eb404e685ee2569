// What device launches do when something is wrong: a peer that never comes, an abort, another call
// at the other end; and what is worn out by many messages: the flags of ll. Built plain and under
// sanitizers.
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "all_reduce_launches.h"
#include "kernels/threads/launch_threads.h"

namespace pycoll {
namespace {

constexpr int kNumRanks = 2;
constexpr uint64_t kOperation = 412;
constexpr int64_t kSlotBytes = 1024;

int num_failures = 0;
int num_cases = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  if (num_failures++ < 10) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
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
    launch_on_threads(all_.launches().data(), num_ranks, pool_);
  }
  /// Whether the sums of so many elements of that round are right.
  bool adds_up(int64_t count, int64_t tile_count, int round) {
    all_.fill(round);
    for (DeviceLaunch& launch : all_.launches()) {
      launch.count = count;
      launch.tile_count = tile_count;
    }
    run();
    return all_.take_sums(round);
  }

 private:
  ThreadPool pool_;
  AllReduceLaunches all_;
};

constexpr DeviceProtocol kProtocols[] = {DeviceProtocol::kSimple, DeviceProtocol::kLL,
                                         DeviceProtocol::kLL128, DeviceProtocol::kPoison,
                                         DeviceProtocol::kDirect};
static_assert(std::size(kProtocols) == kNumDeviceProtocols);

AllReduceShape shape_of(DeviceProtocol protocol) {
  return {.protocol = protocol, .num_threads = 3, .num_channels = 2, .slot_bytes = kSlotBytes};
}

std::string name_of(DeviceProtocol protocol) {
  return "protocol " + std::to_string(static_cast<int>(protocol));
}

void check_report(Operation& operation, int rank, DeviceFailure code, const std::string& what) {
  const DeviceError error = operation.world().error(rank);
  expect(error.code == code, what + ": code " + std::to_string(static_cast<int>(error.code)));
  expect(error.rank == rank && error.peer == 1 - rank, what + ": ranks");
  expect(error.channel < 2, what + ": channel");
  expect(operation.world().failed_operation(rank) == kOperation, what + ": operation");
}

void check_timeout(DeviceProtocol protocol) {
  ++num_cases;
  Operation operation(shape_of(protocol));
  operation.launch(0).timeout_ns = 50'000'000;
  operation.run(1);  // rank 1 never comes
  check_report(operation, 0, DeviceFailure::kTimeout, name_of(protocol) + " timeout");
}

void check_abort(DeviceProtocol protocol) {
  ++num_cases;
  Operation operation(shape_of(protocol));
  std::thread aborts([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic_ref<uint64_t>(operation.world().abort_word()).store(1);
  });
  operation.run(1);
  aborts.join();
  check_report(operation, 0, DeviceFailure::kAborted, name_of(protocol) + " abort");
}

void check_mismatch(DeviceProtocol protocol) {
  ++num_cases;
  Operation operation(shape_of(protocol));
  operation.launch(1).digest ^= 0x1010;
  operation.run();
  for (int rank = 0; rank < kNumRanks; ++rank) {
    check_report(operation, rank, DeviceFailure::kMismatch, name_of(protocol) + " mismatch");
  }
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
  expect(operation.adds_up(128, 128, 2), "ll after its flags repeated");
}

void check() {
  for (const DeviceProtocol protocol : kProtocols) {
    check_timeout(protocol);
    check_abort(protocol);
    check_mismatch(protocol);
  }
  check_low_latency_flags_repeat();
}

}  // namespace
}  // namespace pycoll

int main() {
  pycoll::check();
  std::printf("%d cases, %d failures\n", pycoll::num_cases, pycoll::num_failures);
  return pycoll::num_failures == 0 ? 0 : 1;
}
