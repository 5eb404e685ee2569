#include "comm/device/cpu_staging.h"

#include <algorithm>

#include "comm/runner.h"
#include "schedule/collectives.h"

namespace pycoll {
namespace {

constexpr int64_t kPartBytes = int64_t{4} << 20;  // of the payload
constexpr size_t kNumSlots = 3;                   // one is fetched, one crosses, one is delivered

int64_t element_bytes(const Call& call) {
  return static_cast<int64_t>(call.element_size != 0 ? call.element_size : dtype_size(call.dtype));
}

bool has_equal_blocks(const Call& call) {
  return call.block_counts == nullptr && call.send_counts == nullptr;
}

/// Elements of a block in one part; identical on all ranks.
int64_t part_elements(const Call& call, int num_ranks) {
  const int64_t bytes = element_bytes(call) * info(call.collective).blocks_per_payload(num_ranks);
  return std::max<int64_t>(kPartBytes / bytes, 1);
}

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
  const int64_t step = in_parts ? part_elements(call, num_ranks_) : 1;
  const int64_t num_parts = in_parts && call.count > 0 ? (call.count + step - 1) / step : 1;
  const auto part_at = [&](int64_t i) {
    return in_parts ? Part{i * step, std::min(step, call.count - i * step)} : Part{0, 0};
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

void CpuStaging::make_room(const Call& call, Part part, Slot& slot) {
  Call one = call;
  if (has_equal_blocks(call)) one.count = part.count;
  grow(device_, slot.input, slot.input_bytes,
       input_count(one, rank_, num_ranks_) * element_bytes(call));
  grow(device_, slot.output, slot.output_bytes,
       output_count(one, rank_, num_ranks_) * element_bytes(call));
}

// Calls copy(offset in the caller's buffer, offset in the slot, nbytes) for each run of bytes.
template <class Copy>
void CpuStaging::for_each_block(const Call& call, Part part, int64_t total,
                                const Copy& copy) const {
  const int64_t size = element_bytes(call);
  if (!has_equal_blocks(call) || part.count == call.count) {
    if (total != 0) copy(0, 0, total * size);
    return;
  }
  const int64_t num_blocks = total / call.count;
  for (int64_t block = 0; block < num_blocks; ++block) {
    copy((block * call.count + part.begin) * size, block * part.count * size, part.count * size);
  }
}

void CpuStaging::fetch(const Call& call, Part part, Slot& slot) {
  const auto* from = static_cast<const std::byte*>(call.input);
  const int64_t total = from != nullptr ? input_count(call, rank_, num_ranks_) : 0;
  for_each_block(call, part, total, [&](int64_t at, int64_t to, int64_t nbytes) {
    device_.copy(slot.input.data() + to, from + at, static_cast<size_t>(nbytes), down_.get());
  });
  slot.fetched.record(down_.get());
}

void CpuStaging::deliver(const Call& call, Part part, Slot& slot) {
  auto* to = static_cast<std::byte*>(call.output);
  const int64_t total = to != nullptr ? output_count(call, rank_, num_ranks_) : 0;
  for_each_block(call, part, total, [&](int64_t at, int64_t from, int64_t nbytes) {
    device_.copy(to + at, slot.output.data() + from, static_cast<size_t>(nbytes), up_.get());
  });
  slot.delivered.record(up_.get());
  slot.used = true;
}

Call CpuStaging::cpu_call(const Call& call, Part part, const Slot& slot) const {
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
