#include "comm/device/device_arrays.h"

#include "base/error.h"
#include "transport/ring/records.h"

namespace pycoll {

void DeviceArrays::add(std::byte* data, size_t nbytes, std::unique_ptr<DeviceWindow> window,
                       std::shared_ptr<void> keep_alive) {
  const std::lock_guard lock(mutex_);
  const auto [at, is_new] = arrays_.try_emplace(
      data, Array{++last_number_, 0, nbytes, std::move(window), std::move(keep_alive)});
  if (!is_new) throw UsageError("this array is already registered: unregister it first");
  // Makes the tables now: a captured call could not allocate them.
  for (const auto& [other_data, other] : arrays_) {
    make_table(other, at->second);
    if (&other != &at->second) make_table(at->second, other);
  }
}

void DeviceArrays::make_table(const Array& input, const Array& output) {
  std::vector<DevicePeerBuffers> peers(static_cast<size_t>(num_ranks_));
  for (int rank = 0; rank < num_ranks_; ++rank) {
    peers[static_cast<size_t>(rank)] = {input.window->at(rank), output.window->at(rank)};
  }
  DeviceMemory table(device_, peers.size() * sizeof(DevicePeerBuffers));
  device_.copy(table.data(), peers.data(), peers.size() * sizeof(DevicePeerBuffers), nullptr);
  device_.synchronize(nullptr);
  tables_[{input.number, output.number}] = std::move(table);
}

bool DeviceArrays::remove(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  return arrays_.erase(data) != 0;
}

void DeviceArrays::withdraw(uint64_t operation) {
  const std::lock_guard lock(mutex_);
  for (auto& [data, array] : arrays_) {
    if (load_relaxed(array.last_used) < operation) continue;
    store_relaxed(array.last_used, 0);
    (void)device_.table().synchronize_device(device_.index());
    int32_t can = 0;
    device_.check(device_.table().withdraw(device_.index(), const_cast<std::byte*>(data), &can),
                  "moving an array out of memory that late ranks may write");
  }
}

DeviceArrays::Arrays::iterator DeviceArrays::around(const void* data, size_t nbytes) {
  const auto* at = static_cast<const std::byte*>(data);
  auto found = arrays_.upper_bound(at);
  if (found == arrays_.begin()) return arrays_.end();
  --found;
  const auto offset = static_cast<size_t>(at - found->first);
  return offset + nbytes <= found->second.nbytes ? found : arrays_.end();
}

std::optional<DeviceArrays::Places> DeviceArrays::find(const void* input, size_t input_bytes,
                                                       const void* output, size_t output_bytes) {
  const auto in = around(input, input_bytes);
  const auto out = around(output, output_bytes);
  if (in == arrays_.end() || out == arrays_.end()) return std::nullopt;
  const auto table = tables_.find({in->second.number, out->second.number});
  if (table == tables_.end()) return std::nullopt;
  Places places;
  places.input_used = &in->second.last_used;
  places.output_used = &out->second.last_used;
  places.peer_buffers = reinterpret_cast<const DevicePeerBuffers*>(table->second.data());
  places.input_offset = static_cast<const std::byte*>(input) - in->first;
  places.output_offset = static_cast<std::byte*>(const_cast<void*>(output)) - out->first;
  const int64_t where[] = {static_cast<int64_t>(in->second.number), places.input_offset,
                           static_cast<int64_t>(out->second.number), places.output_offset};
  places.hash = hash_counts(where, 4);
  return places;
}

}  // namespace pycoll
