#include "comm/device/staging/cpu_staging.h"

#include <algorithm>

#include "comm/runner.h"

namespace pycoll {
namespace {

constexpr int64_t kPartBytes = int64_t{4} << 20;  // of the payload
constexpr size_t kNumSlots = 3;                   // one is fetched, one crosses, one is delivered

void grow(const Device& device, PinnedMemory& memory, size_t& has, int64_t wanted) {
  if (static_cast<size_t>(wanted) <= has) return;
  memory = PinnedMemory(device, static_cast<size_t>(wanted));
  has = static_cast<size_t>(wanted);
}

}  // namespace

CpuStaging::CpuStaging(const Device& device, int rank, int num_ranks)
    : device_(device),
      rank_(rank),
      num_ranks_(num_ranks),
      down_(device),
      up_(device),
      over_(device) {
  for (size_t i = 0; i < kNumSlots; ++i) slots_.emplace_back(device);
  over_.record(up_.get());
}

CpuStaging::~CpuStaging() { finish_copies(); }

void CpuStaging::finish_copies() const {
  for (const Stream* stream : {&down_, &up_}) {
    (void)device_.table().synchronize_stream(device_.index(), stream->get());
  }
}

void CpuStaging::run(const Call& call, const StreamEvent& begun,
                     const std::function<void(const StreamEvent&)>& wait,
                     const std::function<void(const Call&)>& perform) {
  begun.hold(down_.get());
  try {
    run_parts(call, wait, perform);
  } catch (...) {
    finish_copies();  // parts that crossed before the failure are still being delivered
    throw;
  }
  over_.record(up_.get());
  over_.hold(call.stream);
}

void CpuStaging::run_parts(const Call& call, const std::function<void(const StreamEvent&)>& wait,
                           const std::function<void(const Call&)>& perform) {
  const bool in_parts = has_equal_blocks(call);
  const int64_t step = in_parts ? part_elements(call, num_ranks_, kPartBytes) : 1;
  const int64_t num_parts = in_parts && call.count > 0 ? (call.count + step - 1) / step : 1;
  const auto part_at = [&](int64_t i) {
    return in_parts ? CallPart{i * step, std::min(step, call.count - i * step)} : CallPart{0, 0};
  };
  const auto slot_at = [&](int64_t i) -> Slot& {
    return slots_[static_cast<size_t>(i) % kNumSlots];
  };
  for (int64_t i = 0; i <= num_parts; ++i) {
    if (i < num_parts) {
      Slot& slot = slot_at(i);
      if (slot.used) wait(slot.delivered);
      make_room(call, part_at(i), slot);
      fetch(call, part_at(i), slot);
    }
    if (i == 0) continue;
    Slot& slot = slot_at(i - 1);
    wait(slot.fetched);
    perform(cpu_call(call, part_at(i - 1), slot));
    deliver(call, part_at(i - 1), slot);
  }
}

void CpuStaging::make_room(const Call& call, CallPart part, Slot& slot) {
  Call one = call;
  if (has_equal_blocks(call)) one.count = part.count;
  grow(device_, slot.input, slot.input_bytes,
       input_count(one, rank_, num_ranks_) * element_bytes(call));
  grow(device_, slot.output, slot.output_bytes,
       output_count(one, rank_, num_ranks_) * element_bytes(call));
}

void CpuStaging::fetch(const Call& call, CallPart part, Slot& slot) {
  const auto* from = static_cast<const std::byte*>(call.input);
  const int64_t total = from != nullptr ? input_count(call, rank_, num_ranks_) : 0;
  for_each_run(call, part, total, [&](int64_t at, int64_t to, int64_t nbytes) {
    device_.copy(slot.input.data() + to, from + at, static_cast<size_t>(nbytes), down_.get());
  });
  slot.fetched.record(down_.get());
}

void CpuStaging::deliver(const Call& call, CallPart part, Slot& slot) {
  auto* to = static_cast<std::byte*>(call.output);
  const int64_t total = to != nullptr ? output_count(call, rank_, num_ranks_) : 0;
  for_each_run(call, part, total, [&](int64_t at, int64_t from, int64_t nbytes) {
    device_.copy(to + at, slot.output.data() + from, static_cast<size_t>(nbytes), up_.get());
  });
  slot.delivered.record(up_.get());
  slot.used = true;
}

Call CpuStaging::cpu_call(const Call& call, CallPart part, const Slot& slot) const {
  Call host = call;
  host.device = -1;
  host.stream = nullptr;
  host.on_slow = {};
  if (has_equal_blocks(call)) host.count = part.count;
  if (call.input != nullptr) host.input = slot.input.data();
  if (call.output != nullptr) host.output = slot.output.data();
  return host;
}

}  // namespace pycoll
