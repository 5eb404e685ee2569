#include "comm/device/staging/peer_staging.h"

#include "comm/runner.h"

namespace pycoll {

PeerStaging::PeerStaging(Transport& transport, const Device& device, bool on_host, DeviceSlab& slab,
                         const AllGather& gather, const Deadline& deadline)
    : device_(device),
      rank_(transport.rank()),
      num_ranks_(transport.num_ranks()),
      arrays_(device, num_ranks_, slab) {
  constexpr size_t kBoth = 2 * kBytes;
  std::unique_ptr<DeviceWindow> window;
  std::shared_ptr<DeviceMemory> memory;
  if (!on_host) {
    memory = std::make_shared<DeviceMemory>(device, kBoth);
    std::string why;
    window = DeviceWindow::over(transport, device, {memory->data(), kBoth, memory}, gather,
                                deadline, why);
  }
  if (window == nullptr) {
    window = DeviceWindow::of_cpu_memory(transport, device, kBoth, gather, deadline);
  }
  inputs_ = window->at(rank_);
  arrays_.add(inputs_, kBoth, std::move(window), memory);
  places_ = *arrays_.find(inputs_, kBytes, inputs_ + kBytes, kBytes);
}

bool PeerStaging::can(const Call& call) {
  // Rank 0 of exscan keeps its output, which no copy may replace.
  return has_equal_blocks(call) && call.collective != Collective::kExscan;
}

CallPart PeerStaging::part(const Call& call, int64_t begin) const {
  return {begin, std::min(part_elements(call, num_ranks_, kBytes), call.count - begin)};
}

Call PeerStaging::call_on_copies(const Call& call, CallPart part) const {
  Call copies = call;
  copies.count = part.count;
  copies.input = inputs_;
  copies.output = inputs_ + kBytes;
  return copies;
}

void PeerStaging::fetch(const Call& call, CallPart part) const {
  const auto* from = static_cast<const std::byte*>(call.input);
  const int64_t total = from != nullptr ? input_count(call, rank_, num_ranks_) : 0;
  for_each_run(call, part, total, [&](int64_t at, int64_t to, int64_t nbytes) {
    device_.copy(inputs_ + to, from + at, static_cast<size_t>(nbytes), call.stream);
  });
}

void PeerStaging::deliver(const Call& call, CallPart part) const {
  auto* to = static_cast<std::byte*>(call.output);
  const int64_t total = to != nullptr ? output_count(call, rank_, num_ranks_) : 0;
  for_each_run(call, part, total, [&](int64_t at, int64_t from, int64_t nbytes) {
    device_.copy(to + at, inputs_ + kBytes + from, static_cast<size_t>(nbytes), call.stream);
  });
}

}  // namespace pycoll
