// The launches of one all_reduce of f32 on all ranks of a process, with one way through the
// memory of a DeviceWorld: for what compares ways to run them.
#pragma once

#include <memory_resource>
#include <string>
#include <vector>

#include "algorithms/table/registry.h"
#include "device_world.h"
#include "executor/device/device_program.h"
#include "plan/plan.h"

namespace pycoll {

class AllReduceLaunches {
 public:
  AllReduceLaunches(const std::string& algorithm, int num_ranks, DeviceProtocol protocol,
                    int64_t count, int num_threads,
                    std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : plans_(make_plans(algorithm, num_ranks)),
        world_({.num_ranks = num_ranks,
                .protocol = protocol,
                .num_channels = 1,
                .slot_bytes = kSlotBytes,
                .num_slots = num_slots()},
               memory),
        launches_(static_cast<size_t>(num_ranks), memory),
        input_(static_cast<size_t>(num_ranks * count), memory),
        output_(input_.size(), memory),
        count_(count) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      DeviceLaunch& launch = launches_[static_cast<size_t>(rank)];
      const Plan& plan = plans_[static_cast<size_t>(rank)];
      world_.set_up(launch, rank);
      set_program(launch, plan, device_program(plan));
      launch.buffers[0] = reinterpret_cast<std::byte*>(input_.data() + rank * count);
      launch.buffers[1] = reinterpret_cast<std::byte*>(output_.data() + rank * count);
      launch.count = count;
      launch.granule = device_granule(sizeof(float));
      launch.tile_count = device_tile_count(
          plan, device_payload_bytes(protocol, kSlotBytes, sizeof(float)), sizeof(float));
      launch.num_threads = num_threads;
      launch.digest = 0x1234567;
      launch.timeout_ns = 10'000'000'000;
      for (int64_t i = 0; i < count; ++i) {
        input_[static_cast<size_t>(rank * count + i)] = static_cast<float>(rank + 1 + i % 5);
      }
    }
  }
  /// By rank.
  const std::pmr::vector<DeviceLaunch>& launches() const { return launches_; }
  int num_ranks() const { return static_cast<int>(launches_.size()); }
  /// Whether the outputs are the sums, which are forgotten then.
  bool take_sums() {
    const int n = num_ranks();
    bool right = true;
    for (size_t at = 0; at < output_.size(); ++at) {
      const auto i = static_cast<int64_t>(at) % count_;
      const auto sum = static_cast<float>(n * (n + 1) / 2 + n * (i % 5));
      right = right && output_[at] == sum;
      output_[at] = 0;
    }
    for (int rank = 0; rank < n; ++rank) {
      right = right && world_.error(rank).code == DeviceFailure::kNone;
    }
    return right;
  }

 private:
  static constexpr int64_t kSlotBytes = 16 << 10;

  static std::vector<Plan> make_plans(const std::string& algorithm, int num_ranks) {
    const Schedule schedule =
        find_algorithm(Collective::kAllReduce, algorithm).generate(num_ranks, 0);
    std::vector<Plan> plans;
    for (int rank = 0; rank < num_ranks; ++rank) {
      plans.push_back(make_plan(schedule, rank, {.num_slots = kMaxSlots, .multicast = false}));
    }
    return plans;
  }
  int num_slots() const {
    int num = 2;
    for (const Plan& plan : plans_) num = num < plan.min_slots ? plan.min_slots : num;
    return num;
  }

  std::vector<Plan> plans_;
  DeviceWorld world_;
  std::pmr::vector<DeviceLaunch> launches_;
  std::pmr::vector<float> input_;
  std::pmr::vector<float> output_;
  int64_t count_;
};

}  // namespace pycoll
