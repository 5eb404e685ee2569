#include "comm/recorder.h"

#include <algorithm>

#include "comm/call.h"

namespace pycoll {

Recorder::Recorder(const Segment& segment, int rank)
    : segment_(segment),
      ring_(segment.records(rank)),
      names_(segment.names(rank)),
      rank_(rank),
      steady_counter_(has_steady_counter()) {}

const CallRecord& Recorder::prepare(const Call& call, uint64_t sequence, PlannedCall& planned) {
  if (planned.name_id == 0) name_plan(planned);
  if (call.algorithm != last_asked_) {
    last_asked_ = call.algorithm;
    last_asked_id_ = name_id(last_asked_);
    last_asked_hash_ = hash_text(last_asked_);
  }
  const bool has_counts = call.block_counts != nullptr || call.send_counts != nullptr;
  CallRecord& record = current_;
  record.sequence = sequence;
  record.entered = read_ticks(steady_counter_);
  record.collective = static_cast<uint8_t>(call.collective);
  record.dtype = static_cast<uint8_t>(call.dtype);
  record.op = static_cast<uint8_t>(call.op);
  record.num_dims = static_cast<uint8_t>(call.num_dims);
  // Only the root of a scatter passes an input array, so the shapes may differ.
  record.flags =
      static_cast<uint8_t>((call.deterministic ? CallRecord::kDeterministic : 0) |
                           (has_counts ? CallRecord::kHasCounts : 0) |
                           (call.collective == Collective::kScatter || call.shapes_may_differ
                                ? CallRecord::kShapesMayDiffer
                                : 0) |
                           (call.device >= 0 ? CallRecord::kOnDevice : 0));
  const bool opaque = call.dtype == DType::kOpaque;
  const size_t element_size = opaque ? call.element_size : dtype_size(call.dtype);
  record.element_size = static_cast<uint16_t>(std::min<size_t>(element_size, 0xffff));
  record.dtype_hash = opaque ? call.dtype_hash : 0;
  record.dtype_text = opaque ? call.dtype_text : uint16_t{0};
  record.site = call.site;
  record.root = static_cast<int16_t>(call.root);
  record.asked = last_asked_id_;
  record.asked_hash = last_asked_hash_;
  record.chosen = planned.name_id;
  record.chosen_hash = planned.name_hash;
  record.counts_hash = call.block_counts != nullptr
                           ? hash_counts(call.block_counts, segment_.num_ranks())
                           : call.places_hash;
  record.count = opaque ? call.count * static_cast<int64_t>(element_size) : call.count;
  std::copy_n(call.shape, 6, record.shape);
  record.digest = record.compute_digest();
  return record;
}

void Recorder::name_plan(PlannedCall& planned) {
  const std::string name = planned.plan.algorithm + "/" + protocol_name(planned.protocol);
  planned.name_id = name_id(name);
  planned.name_hash = hash_text(name + "/" + std::to_string(planned.plan.programs_hash));
}

void Recorder::fail() {
  ring_.finish(current_.sequence, read_ticks(steady_counter_) | CallRecord::kFailed);
  refuse();
}

void Recorder::fail(uint64_t sequence) {
  CallRecord record;
  if (ring_.read(sequence, &record)) {
    ring_.finish(sequence, read_ticks(steady_counter_) | CallRecord::kFailed);
  }
  refuse();
}

void Recorder::refuse() {
  std::function<void()> call_once;
  {
    const std::lock_guard lock(mutex_);
    std::swap(call_once, on_failure_);
  }
  if (call_once) call_once();
}

bool Recorder::may_leave_early(const Call& call, int rank, int num_ranks) {
  // Blocks of no elements send no messages.
  if (call.block_counts != nullptr || call.send_counts != nullptr) return true;
  switch (call.collective) {
    case Collective::kBroadcast:
    case Collective::kScatter:
      return rank == call.root;  // the others receive a message, with a digest, from the root
    case Collective::kReduce:
    case Collective::kGather:
      return rank != call.root;
    case Collective::kScan:
    case Collective::kExscan:
      return rank != num_ranks - 1;
    case Collective::kNeighborExchange:
      return num_ranks > 3;
    default:
      return false;  // the result depends on every rank
  }
}

uint16_t Recorder::name_id(std::string_view text) {
  if (text.empty()) return 0;
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = ids_.try_emplace(std::string(text), uint16_t{0});
  if (is_new && num_names_ + 1 < NameTable::kReason) {
    names_.write(++num_names_, text);
    found->second = num_names_;
  }
  return found->second;
}

}  // namespace pycoll
