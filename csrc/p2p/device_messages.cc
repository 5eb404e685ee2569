#include "p2p/device_messages.h"

#include <bit>
#include <deque>

#include "base/error.h"
#include "base/fd.h"
#include "bootstrap/local/process_info.h"
#include "device/device_library.h"
#include "transport/transport.h"

namespace pycoll {
namespace {

constexpr size_t kMinBytes = size_t{2} << 20;  // an allocation has at least this size

}  // namespace

/// The memory of this rank's sends: as many allocations as sends were under way at once.
struct DeviceMessages::Pool {
  struct Allocation {
    DeviceMemory memory;
    Fd fd;
    DeviceOffer offer;
    bool is_free = false;
  };

  Allocation* find_free(const Device& device, size_t nbytes, size_t* index) {
    Allocation* best = nullptr;
    for (size_t i = 0; i < allocations.size(); ++i) {
      Allocation& one = allocations[i];
      if (!one.is_free || one.offer.device != device.index() || one.memory.nbytes() < nbytes ||
          (best != nullptr && best->memory.nbytes() <= one.memory.nbytes())) {
        continue;
      }
      best = &one;
      *index = i;
    }
    return best;
  }

  std::mutex mutex;
  std::deque<Allocation> allocations;  // never moved: peers read the offers
};

DeviceMessages::Bytes::~Bytes() {
  const std::lock_guard lock(pool_->mutex);
  pool_->allocations[index_].is_free = true;
}

std::byte* DeviceMessages::Bytes::data() const { return pool_->allocations[index_].memory.data(); }

const DeviceOffer* DeviceMessages::Bytes::offer() const {
  return &pool_->allocations[index_].offer;
}

std::shared_ptr<DeviceMessages::Bytes> DeviceMessages::stage(const Device& device, const void* src,
                                                             size_t nbytes, DeviceStream stream) {
  std::shared_ptr<Pool> pool;
  {
    const std::lock_guard lock(mutex_);
    if (pool_ == nullptr) pool_ = std::make_shared<Pool>();
    pool = pool_;
  }
  size_t index = 0;
  {
    const std::lock_guard lock(pool->mutex);
    Pool::Allocation* found = pool->find_free(device, nbytes, &index);
    if (found == nullptr) {
      index = pool->allocations.size();
      found = &pool->allocations.emplace_back();
      // Powers of two, so that messages of similar sizes use the same memory.
      found->memory = DeviceMemory(device, std::bit_ceil(std::max(nbytes, kMinBytes)));
      DeviceOffer& offer = found->offer;
      int32_t fd = -1;
      if (device.table().export_memory(found->memory.data(), &offer.handle, &fd) != 0) {
        offer.handle.kind = DeviceHandleKind::kNone;
      }
      found->fd = Fd(fd);
      offer.fd = fd;
      offer.allocation = index;
      offer.address = reinterpret_cast<uint64_t>(found->memory.data());
      offer.device = device.index();
    }
    found->is_free = false;
  }
  auto bytes = std::make_shared<Bytes>(std::move(pool), index);
  device.copy(bytes->data(), src, nbytes, stream);
  return bytes;
}

void DeviceMessages::copy(int device, void* dst, const void* src, size_t nbytes) {
  const Device its(device_table(), device);
  const auto stream = streams_.try_emplace(device, its).first;
  its.copy(dst, src, nbytes, stream->second.get());
  its.synchronize(stream->second.get());
}

const std::byte* DeviceMessages::find(int source, uint64_t address, int device) {
  DeviceOffer offer;
  if (!peer_memory_.read(source, &offer, address, sizeof(offer))) return nullptr;
  if (transport_.shares_address_space()) return reinterpret_cast<const std::byte*>(offer.address);
  const auto [at, is_new] = mapped_.try_emplace({source, offer.allocation}, nullptr);
  if (!is_new) return at->second;
  Fd fd;
  if (offer.handle.kind == DeviceHandleKind::kNone) return nullptr;
  if (offer.handle.kind == DeviceHandleKind::kFd) {
    fd = fd_of_process(transport_.pid(source), offer.fd);
    if (!fd) return nullptr;
  }
  void* base = nullptr;
  if (device_table().import_memory(device, &offer.handle, fd.get(), &base) != 0) return nullptr;
  at->second = static_cast<std::byte*>(base);
  return at->second;
}

void DeviceMessages::release() {
  for (const auto& [key, base] : mapped_) {
    if (base != nullptr) (void)device_table().release_import(base);
  }
  mapped_.clear();
  streams_.clear();
  const std::lock_guard lock(mutex_);
  pool_.reset();
}

}  // namespace pycoll
