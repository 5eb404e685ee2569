#include "comm/device/device_arrays.h"

#include "base/error.h"
#include "transport/ring/records.h"

namespace pycoll {

void DeviceArrays::add(std::byte* data, size_t nbytes, std::unique_ptr<DeviceWindow> window,
                       std::shared_ptr<void> keep_alive) {
  const std::lock_guard lock(mutex_);
  const auto [at, is_new] = arrays_.try_emplace(
      data, Array{++last_number_, 0, nbytes, std::move(window), std::move(keep_alive), nullptr});
  if (!is_new) throw UsageError("this array is already registered: unregister it first");
  // Makes the table now: a captured call could not allocate it.
  std::vector<std::byte*> addresses;
  for (int rank = 0; rank < num_ranks_; ++rank) addresses.push_back(at->second.window->at(rank));
  at->second.at_peers = reinterpret_cast<std::byte* const*>(
      slab_.put(addresses.data(), addresses.size() * sizeof(std::byte*)));
}

std::string DeviceArrays::describe_unreached() const {
  if (num_unreached_ == 0) return {};
  return std::to_string(num_unreached_) +
         (num_unreached_ == 1 ? " registered array is" : " registered arrays are") +
         " sent through slots, because the ranks do not reach the memory (" + why_unreached_ + ")";
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
  Places places;
  places.input_used = &in->second.last_used;
  places.output_used = &out->second.last_used;
  places.peer_inputs = in->second.at_peers;
  places.peer_outputs = out->second.at_peers;
  places.input_window = in->second.window.get();
  places.output_window = out->second.window.get();
  places.input_offset = static_cast<const std::byte*>(input) - in->first;
  places.output_offset = static_cast<std::byte*>(const_cast<void*>(output)) - out->first;
  const int64_t where[] = {static_cast<int64_t>(in->second.number), places.input_offset,
                           static_cast<int64_t>(out->second.number), places.output_offset};
  places.hash = hash_counts(where, 4);
  return places;
}

}  // namespace pycoll
