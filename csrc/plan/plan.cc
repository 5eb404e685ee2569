#include "plan/plan.h"

#include <algorithm>

#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/verify.h"

namespace pycoll {
namespace {

// A local source is the caller's input until this rank writes those chunks. When a range is written
// in part, or a chunk that the goal needs is never written, the input is copied to the output
// first.
bool mark_input_reads(const Schedule& schedule, Program& program) {
  std::vector<bool> written(static_cast<size_t>(program.num_chunks), false);
  for (Step& step : program.steps) {
    const auto begin = written.begin() + step.first_chunk;
    const auto end = begin + step.num_chunks;
    if (step.has(kReadLocal)) {
      const bool any = std::find(begin, end, true) != end;
      if (any && std::find(begin, end, false) != end) return true;
      if (!any) step.flags |= kReadInput;
    }
    if (step.has(kWriteLocal)) std::fill(begin, end, true);
  }
  for (int chunk = 0; chunk < program.num_chunks; ++chunk) {
    const BlockAt at = schedule.block_at(program.rank, chunk);
    if (!written[static_cast<size_t>(chunk)] &&
        info(schedule.collective).goal(at).kind != Goal::Kind::kAny) {
      return true;
    }
  }
  return false;
}

}  // namespace

Plan make_plan(const Schedule& schedule, int rank, int num_slots, bool multicast) {
  std::vector<Program> programs = lower(schedule, {.fuse = true, .multicast = multicast});
  std::string error;
  const int min_slots = min_safe_slots(schedule, programs, num_slots, &error);
  if (min_slots == 0) {
    throw UsageError(std::string(info(schedule.collective).name) + " algorithm " +
                     schedule.algorithm + " for " + std::to_string(schedule.num_ranks) +
                     " ranks is not proved with " + std::to_string(num_slots) +
                     " slots and will not be run: " + error);
  }
  Plan plan;
  plan.collective = schedule.collective;
  plan.algorithm = schedule.algorithm;
  plan.program = std::move(programs[static_cast<size_t>(rank)]);
  plan.min_slots = min_slots;
  plan.copy_input = mark_input_reads(schedule, plan.program);
  if (plan.copy_input) {
    for (Step& step : plan.program.steps) step.flags &= static_cast<uint8_t>(~kReadInput);
  }
  return plan;
}

int64_t tile_count(const Program& program, int64_t slot_payload_bytes, size_t element_size) {
  // A range of k of C chunks of a tile of t elements has at most ceil(k * t / C) elements.
  const int64_t slot_count = slot_payload_bytes / static_cast<int64_t>(element_size);
  // Chunks of equal length where possible: then every rank sends what the formulas say.
  const int64_t chunk_count = slot_count / std::max(program.max_range, 1);
  if (chunk_count > 0) return chunk_count * program.num_chunks;
  return slot_count * program.num_chunks / program.max_range;
}

}  // namespace pycoll
