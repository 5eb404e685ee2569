// The launches of one all_reduce of f32 on all ranks of a process, with one way through the
// memory of a DeviceWorld: for checks of what launches do, and of ways to run them.
#pragma once

#include <algorithm>
#include <memory_resource>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/table/registry.h"
#include "device_world.h"
#include "executor/device/device_program.h"
#include "plan/direct_plan.h"
#include "plan/plan.h"

namespace pycoll {

struct AllReduceShape {
  std::string algorithm = "one_shot";
  int num_ranks = 2;
  DeviceProtocol protocol = DeviceProtocol::kSimple;
  int64_t count = 64;
  int num_threads = 2;  // of a block
  int num_channels = 1;
  int64_t slot_bytes = 16 << 10;
  bool phases = true;
  bool by_size = false;  // as many channels as the message needs, and `num_channels` at most
};

class AllReduceLaunches {
 public:
  /// Has no launches where the protocol cannot run the algorithm.
  explicit AllReduceLaunches(const AllReduceShape& shape,
                             std::pmr::memory_resource* memory = std::pmr::get_default_resource(),
                             ptrdiff_t shift = 0)
      : shape_(shape),
        shift_(shift),
        plans_(make_plans(shape)),
        cut_(make_cut()),
        world_({.num_ranks = shape.num_ranks,
                .protocol = shape.protocol,
                .num_channels = cut_.num_channels,
                .slot_bytes = shape.slot_bytes,
                .num_slots = num_slots()},
               memory, shift),
        launches_(plans_.size(), memory),
        peer_inputs_(plans_.size(), memory),
        peer_outputs_(plans_.size(), memory),
        input_(static_cast<size_t>(shape.num_ranks * shape.count), memory),
        output_(input_.size(), memory),
        scratch_(num_scratch() * plans_.size(), memory) {
    for (int rank = 0; rank < static_cast<int>(plans_.size()); ++rank) set_up(rank);
    fill(0);
  }
  AllReduceLaunches(const std::string& algorithm, int num_ranks, DeviceProtocol protocol,
                    int64_t count, int num_threads,
                    std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : AllReduceLaunches({algorithm, num_ranks, protocol, count, num_threads,
                           AllReduceShape().num_channels, AllReduceShape().slot_bytes},
                          memory) {}

  /// By rank.
  std::pmr::vector<DeviceLaunch>& launches() { return launches_; }
  int num_ranks() const { return shape_.num_ranks; }
  DeviceWorld& world() { return world_; }

  /// The rank's input of that round.
  void fill(int rank, int round) {
    for (int64_t i = 0; i < shape_.count; ++i) input_[at(rank, i)] = value(rank, i, round);
  }
  void fill(int round) {
    for (int rank = 0; rank < num_ranks(); ++rank) fill(rank, round);
  }
  /// Whether the rank's output is the sum of that round's inputs, which is forgotten then.
  bool take_sum(int rank, int round) {
    bool right = world_.error(rank).code == DeviceFailure::kNone;
    for (int64_t i = 0; i < launches_[static_cast<size_t>(rank)].count; ++i) {
      float sum = 0;
      for (int from = 0; from < num_ranks(); ++from) sum += value(from, i, round);
      right = right && output_[at(rank, i)] == sum;
      output_[at(rank, i)] = 0;
    }
    return right;
  }
  bool take_sums(int round = 0) {
    bool right = true;
    for (int rank = 0; rank < num_ranks(); ++rank) right = take_sum(rank, round) && right;
    return right;
  }

 private:
  /// Sums of them are exact.
  static float value(int rank, int64_t i, int round) {
    return static_cast<float>((rank + 1) * (round + 1) + static_cast<int>(i % 7));
  }
  static std::vector<Plan> make_plans(const AllReduceShape& shape) {
    const Schedule schedule =
        find_algorithm(Collective::kAllReduce, shape.algorithm).generate(shape.num_ranks, 0);
    std::vector<Plan> plans;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      if (shape.protocol == DeviceProtocol::kDirect) {
        std::optional<DirectPlan> direct = make_direct_plan(schedule, rank);
        if (!direct) return {};
        plans.push_back(std::move(direct->plan));
      } else {
        plans.push_back(make_plan(
            schedule, rank, {.num_slots = kMaxSlots, .multicast = false, .phases = shape.phases}));
      }
    }
    return plans;
  }
  int num_slots() const {
    int num = 2;
    for (const Plan& plan : plans_) {
      num = std::max(num, shape_.protocol == DeviceProtocol::kPoison
                              ? kPoisonBuffers * device_program(plan).max_link_messages
                              : power_of_two(plan.min_slots));
    }
    return num;
  }
  /// Elements of a rank's scratch.
  size_t num_scratch() const {
    size_t num_blocks = 0;
    for (const Plan& plan : plans_) {
      num_blocks = std::max(num_blocks, plan.placement.scratch.size());
    }
    return num_blocks * static_cast<size_t>(shape_.count);
  }
  DeviceCut make_cut() const {
    if (plans_.empty()) return {1, 1};
    const int64_t tile = device_tile_count(
        plans_[0], device_payload_bytes(shape_.protocol, shape_.slot_bytes, sizeof(float)),
        sizeof(float));
    if (!shape_.by_size) return {shape_.num_channels, tile};
    return device_cut(shape_.protocol, shape_.count, shape_.count * int64_t{sizeof(float)},
                      device_granule(sizeof(float)), tile, shape_.num_channels);
  }
  template <class T>
  T* seen(T* p) const {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(shift_));
  }
  size_t at(int rank, int64_t i) const { return static_cast<size_t>(rank * shape_.count + i); }

  void set_up(int rank) {
    const auto r = static_cast<size_t>(rank);
    DeviceLaunch& launch = launches_[r];
    const Plan& plan = plans_[r];
    world_.set_up(launch, rank);
    set_program(launch, plan, device_program(plan));
    launch.buffers[0] = reinterpret_cast<std::byte*>(seen(input_.data() + at(rank, 0)));
    launch.buffers[1] = reinterpret_cast<std::byte*>(seen(output_.data() + at(rank, 0)));
    launch.buffers[2] = reinterpret_cast<std::byte*>(seen(scratch_.data() + r * num_scratch()));
    peer_inputs_[r] = launch.buffers[0];
    peer_outputs_[r] = launch.buffers[1];
    launch.peer_inputs = seen(peer_inputs_.data());
    launch.peer_outputs = seen(peer_outputs_.data());
    launch.count = shape_.count;
    launch.granule = device_granule(sizeof(float));
    launch.tile_count = cut_.tile_count;
    launch.num_threads = shape_.num_threads;
    launch.digest = 0x1234567;
    launch.timeout_ns = 60'000'000'000;
  }

  AllReduceShape shape_;
  ptrdiff_t shift_;  // from where the host sees the memory to where kernels see it
  std::vector<Plan> plans_;
  DeviceCut cut_;
  DeviceWorld world_;
  std::pmr::vector<DeviceLaunch> launches_;
  std::pmr::vector<std::byte*> peer_inputs_;
  std::pmr::vector<std::byte*> peer_outputs_;
  std::pmr::vector<float> input_;
  std::pmr::vector<float> output_;
  std::pmr::vector<float> scratch_;
};

}  // namespace pycoll
