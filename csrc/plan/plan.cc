#include "plan/plan.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/slot_bytes.h"
#include "schedule/lower.h"
#include "schedule/verify.h"

namespace pycoll {

namespace {

/// True when a range of some program crosses a block's border, and every rank has a contiguous
/// place for each of its ranges. All ranks compute the same answer.
bool can_join_blocks(const Schedule& schedule, const std::vector<Program>& programs) {
  bool spans_blocks = false;
  for (const Program& program : programs) {
    Program copy = program;
    const std::optional<Placement> placement = place_chunks(schedule, copy);
    if (!placement) return false;
    spans_blocks = spans_blocks || placement->spans_blocks;
  }
  return spans_blocks;
}

/// Rings of all ranks that carry messages: one for each pair of writer and reader, and one for each
/// writer to all.
int64_t count_rings(const std::vector<Program>& programs) {
  int64_t num_rings = 0;
  for (const Program& program : programs) {
    uint64_t readers = 0;
    bool multicast = false;
    for (const Step& step : program.steps) {
      step.has(kMulticastDst) ? multicast = true : readers |= step.dst_peers;
    }
    num_rings += std::popcount(readers) + (multicast ? 1 : 0);
  }
  return num_rings;
}

int trade_depth(const std::vector<Program>& programs) {
  if (programs.size() != 2) return 0;
  int depth = 0;
  for (const Program& program : programs) {
    int num_ahead = 0;  // messages sent, less those read
    for (const Step& step : program.steps) {
      num_ahead += std::popcount(step.dst_peers) - std::popcount(step.src_peers);
      depth = std::max(depth, num_ahead);
    }
    if (num_ahead != 0) return 0;
  }
  return depth;
}

}  // namespace

Plan make_plan(const Schedule& schedule, int rank, const PlanOptions& options) {
  std::vector<Program> programs = lower(schedule, {.multicast = options.multicast,
                                                   .join_blocks = options.join_blocks,
                                                   .join_chunks = options.join_chunks,
                                                   .phases = options.phases});
  bool spans_blocks = false;
  if (options.join_blocks && programs.front().max_range > schedule.pieces_per_block()) {
    spans_blocks = can_join_blocks(schedule, programs);
    if (!spans_blocks) {
      PlanOptions separate = options;
      separate.join_blocks = false;
      return make_plan(schedule, rank, separate);
    }
  }
  std::string error;
  Order order = Order::kOther;
  const int min_slots = min_safe_slots(schedule, programs, options.num_slots, &error, &order);
  if (min_slots == 0) {
    throw UsageError(std::string(info(schedule.collective).name) + " algorithm " +
                     schedule.algorithm + " for " + std::to_string(schedule.num_ranks) +
                     " ranks is not proved with " + std::to_string(options.num_slots) +
                     " slots and cannot be run: " + error);
  }
  Plan plan;
  plan.collective = schedule.collective;
  plan.algorithm = schedule.algorithm;
  plan.programs_hash = hash_programs(programs);
  plan.num_rings = count_rings(programs);
  plan.trade_depth = trade_depth(programs);
  plan.program = std::move(programs[static_cast<size_t>(rank)]);
  plan.min_slots = min_slots;
  plan.order = order;
  plan.spans_blocks = spans_blocks;
  plan.placement = *place_chunks(schedule, plan.program);
  return plan;
}

bool may_trade_places(const Plan& plan, int64_t count, int64_t tile_count, int num_together) {
  if (plan.trade_depth == 0) return false;
  if (count <= tile_count) {
    return plan.trade_depth <= kTradedPlaces && count >= plan.placement.num_pieces;
  }
  const int64_t last_tile = count % tile_count;
  const int64_t least = last_tile != 0 ? last_tile : tile_count;
  return plan.trade_depth * num_together <= kTradedPlaces && least >= plan.placement.num_pieces;
}

uint64_t hash_programs(const std::vector<Program>& programs) {
  uint64_t hash = 1469598103934665603ull;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  for (const Program& program : programs) {
    add(static_cast<uint64_t>(program.num_chunks));
    for (const int32_t peer : program.peers) add(static_cast<uint64_t>(peer));
    for (const Step& step : program.steps) {
      add(step.src_peers);
      add(step.dst_peers);
      add(static_cast<uint64_t>(step.first_chunk) << 32 | static_cast<uint32_t>(step.num_chunks));
      add(step.flags);
    }
  }
  return hash;
}

int64_t tile_count(const Plan& plan, int64_t slot_payload_bytes, size_t element_size) {
  // A range of k of the C chunks of a block of t elements has at most ceil(k * t / C) elements.
  const int64_t num_pieces = plan.placement.num_pieces;
  const int64_t slot_count = slot_payload_bytes / static_cast<int64_t>(element_size);
  // Prefers chunks of equal length: then every rank sends as many bytes as the formulas say.
  const int64_t chunk_count = slot_count / std::max(plan.program.max_range, 1);
  if (chunk_count > 0) return chunk_count * num_pieces;
  return slot_count * num_pieces / plan.program.max_range;
}

}  // namespace pycoll
