#include "torch/bridge/allocator.h"

#include <ATen/ATen.h>

#include <bit>

namespace pycoll::torch_backend {
namespace {

constexpr size_t kMinBlockBytes = 4096;
// Free bytes above this limit are returned to the system.
constexpr size_t kMaxFreeBytes = size_t{512} << 20;

/// Rounds up to one of four block sizes per power of two, so that a tensor of a similar size can
/// reuse a block; wastes at most a quarter.
size_t block_bytes(size_t nbytes) {
  if (nbytes <= kMinBlockBytes) return kMinBlockBytes;
  const size_t step = std::max(std::bit_floor(nbytes - 1) / 4, kMinBlockBytes);
  return (nbytes + step - 1) / step * step;
}

}  // namespace

struct SharedAllocator::Lease {
  std::shared_ptr<SharedAllocator> owner;
  Block block;
};

SharedAllocator::~SharedAllocator() { close(); }

void SharedAllocator::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (auto& [nbytes, blocks] : free_) {
    for (const Block& block : blocks) core().free(block.memory);
  }
  free_.clear();
  num_free_bytes_ = 0;
}

at::Tensor SharedAllocator::allocate(int64_t numel, at::ScalarType type) {
  TORCH_CHECK_VALUE(numel >= 0, "pycoll: cannot allocate a tensor of ", numel, " elements");
  const size_t nbytes = static_cast<size_t>(numel) * c10::elementSize(type);
  auto* lease = new Lease{shared_from_this(), take(nbytes)};
  const auto give_back = [](void* context) {
    const std::unique_ptr<Lease> own(static_cast<Lease*>(context));
    own->owner->give_back(own->block);
  };
  c10::DataPtr data(lease->block.data, lease, give_back, at::Device(at::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), nullptr, false);
  return at::empty({0}, at::TensorOptions(type)).set_(std::move(storage), 0, {numel}, {1});
}

SharedAllocator::Block SharedAllocator::take(size_t nbytes) {
  nbytes = block_bytes(nbytes);
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!closed_, "pycoll: cannot allocate memory: this process group is shut down");
  const auto found = free_.find(nbytes);
  if (found != free_.end() && !found->second.empty()) {
    const Block block = found->second.back();
    found->second.pop_back();
    num_free_bytes_ -= nbytes;
    return block;
  }
  Block block{nullptr, nullptr, nbytes};
  pycoll_error error;
  check(core().allocate(comm_.get(), nbytes, &block.memory, &block.data, &error), error);
  return block;
}

void SharedAllocator::give_back(const Block& block) {
  const std::lock_guard lock(mutex_);
  if (closed_ || num_free_bytes_ + block.nbytes > kMaxFreeBytes) {
    core().free(block.memory);
    return;
  }
  free_[block.nbytes].push_back(block);
  num_free_bytes_ += block.nbytes;
}

}  // namespace pycoll::torch_backend
