// What device launches do when something is wrong: a peer that never comes, an abort, another call
// at the other end; and what is worn out by many messages: the flags of ll. Built plain and under
// sanitizers.
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "algorithms/table/registry.h"
#include "device_world.h"
#include "executor/device/device_program.h"
#include "kernels/threads/launch_threads.h"
#include "plan/direct_plan.h"

namespace pycoll {
namespace {

constexpr int kNumRanks = 2;
constexpr uint64_t kOperation = 412;

int num_failures = 0;
int num_cases = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  if (num_failures++ < 10) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

/// An all_reduce of two ranks, ready to be launched.
class Operation {
 public:
  Operation(DeviceProtocol protocol, int num_channels, int num_threads)
      : world_({.num_ranks = kNumRanks,
                .protocol = protocol,
                .num_channels = num_channels,
                .slot_bytes = 1024,
                .num_slots = protocol == DeviceProtocol::kPoison ? kPoisonBuffers : 2}) {
    const Schedule schedule =
        find_algorithm(Collective::kAllReduce, "one_shot").generate(kNumRanks, 0);
    for (int rank = 0; rank < kNumRanks; ++rank) {
      plans_.push_back(protocol == DeviceProtocol::kDirect
                           ? make_direct_plan(schedule, rank)->plan
                           : make_plan(schedule, rank, {.num_slots = 2, .multicast = false}));
      DeviceLaunch& launch = launches_[rank];
      world_.set_up(launch, rank);
      set_program(launch, plans_.back(), device_program(plans_.back()));
      launch.num_threads = num_threads;
      launch.peer_buffers = peer_buffers_;
      launch.digest = 0x1234567;
      launch.operation = kOperation;
      launch.timeout_ns = 60'000'000'000;
      launch.granule = device_granule(sizeof(float));
    }
    resize(64);
    for (DeviceLaunch& launch : launches_) launch.tile_count = 32;
  }

  void resize(int64_t count) {
    for (int rank = 0; rank < kNumRanks; ++rank) {
      input_[rank].assign(static_cast<size_t>(count), static_cast<float>(rank + 1));
      output_[rank].assign(static_cast<size_t>(count), 0);
      DeviceLaunch& launch = launches_[rank];
      launch.buffers[0] = reinterpret_cast<std::byte*>(input_[rank].data());
      launch.buffers[1] = reinterpret_cast<std::byte*>(output_[rank].data());
      peer_buffers_[rank] = {launch.buffers[0], launch.buffers[1]};
      launch.count = count;
    }
  }
  void set_tile_count(int64_t tile_count) {
    for (DeviceLaunch& launch : launches_) launch.tile_count = tile_count;
  }
  void fill(float value) {
    for (auto& input : input_) input.assign(input.size(), value);
  }
  bool is_sum(float sum) const {
    for (const auto& output : output_) {
      for (const float element : output) {
        if (element != sum) return false;
      }
    }
    return true;
  }
  DeviceLaunch& launch(int rank) { return launches_[rank]; }
  DeviceWorld& world() { return world_; }
  void run(int num_ranks = kNumRanks) { launch_on_threads(launches_, num_ranks, pool_); }

 private:
  ThreadPool pool_;
  DeviceWorld world_;
  std::vector<Plan> plans_;
  DeviceLaunch launches_[kNumRanks];
  DevicePeerBuffers peer_buffers_[kNumRanks];
  std::vector<float> input_[kNumRanks];
  std::vector<float> output_[kNumRanks];
};

constexpr DeviceProtocol kProtocols[] = {DeviceProtocol::kSimple, DeviceProtocol::kLL,
                                         DeviceProtocol::kLL128, DeviceProtocol::kPoison,
                                         DeviceProtocol::kDirect};
static_assert(std::size(kProtocols) == kNumDeviceProtocols);

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
  Operation operation(protocol, 2, 3);
  operation.launch(0).timeout_ns = 50'000'000;
  operation.run(1);  // rank 1 never comes
  check_report(operation, 0, DeviceFailure::kTimeout, name_of(protocol) + " timeout");
}

void check_abort(DeviceProtocol protocol) {
  ++num_cases;
  Operation operation(protocol, 2, 3);
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
  Operation operation(protocol, 2, 3);
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
  constexpr int64_t kPeriod = 1 << 16;
  Operation operation(DeviceProtocol::kLL, 1, 1);
  operation.set_tile_count(128);
  operation.resize(128);
  operation.fill(1);
  operation.run();
  expect(operation.is_sum(2), "ll before its flags repeat");
  operation.set_tile_count(4);
  operation.resize(4 * (kPeriod - 1));
  operation.fill(2);
  operation.run();
  expect(operation.is_sum(4), "ll with many messages");
  operation.set_tile_count(128);
  operation.resize(128);
  operation.fill(3);
  operation.run();
  expect(operation.is_sum(6), "ll after its flags repeated");
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
