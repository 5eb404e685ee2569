#include "transport/memory/device_window.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "bootstrap/local/local_group.h"
#include "transport/memory/mapping.h"

namespace pycoll {
namespace {

/// A rank's memory, as it describes it to the other ranks.
struct Offer {
  DeviceHandle handle{};
  uint64_t address = 0;  // in its process, for kernels
  uint64_t cpu_address = 0;
  uint64_t keep_alive = 0;  // a std::shared_ptr<void>, for ranks of the same process
  int32_t index = 0;        // of the rank's device
};

/// Why a rank cannot use the window; empty if it can. Fixed in size, because it is gathered.
struct Verdict {
  char why[160] = {};

  void set(const std::string& text) { std::snprintf(why, sizeof(why), "%s", text.c_str()); }
};

constexpr int64_t kTestNs = 1'000'000'000;  // for a word to arrive that was stored before

uint64_t word_of(size_t from, size_t to) { return 0x7079636f6c6c0000ull + (from << 8) + to; }

/// CPU memory that this process maps and that its devices reach.
class HostRegion {
 public:
  HostRegion(const Device& device, int fd, size_t nbytes) : device_(device), mapping_(fd, nbytes) {
    device_.check(device_.table().map_host(mapping_.base(), nbytes, &on_device_),
                  "mapping CPU memory");
  }
  HostRegion(const HostRegion&) = delete;
  ~HostRegion() { device_.table().unmap_host(mapping_.base()); }

  std::byte* base() const { return mapping_.base(); }
  std::byte* on_device() const { return static_cast<std::byte*>(on_device_); }

 private:
  Device device_;
  Mapping mapping_;
  void* on_device_ = nullptr;
};

/// The first reason of any rank, identical on all ranks; empty if there is none.
std::string first_complaint(Transport& transport, const Verdict& mine, const AllGather& gather) {
  std::vector<Verdict> all(static_cast<size_t>(transport.num_ranks()));
  gather(&mine, all.data(), sizeof(mine));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].why[0] != 0) return "rank " + std::to_string(rank) + ": " + all[rank].why;
  }
  return {};
}

}  // namespace

DeviceWindow::DeviceWindow(const Device& device, int num_ranks)
    : device_(device),
      bases_(static_cast<size_t>(num_ranks)),
      nbytes_(static_cast<size_t>(num_ranks)) {}

DeviceWindow::~DeviceWindow() {
  for (void* base : imports_) device_.table().release_import(base);
}

std::unique_ptr<DeviceWindow> DeviceWindow::over(Transport& transport, const Device& device,
                                                 const Memory& memory, const AllGather& gather,
                                                 const Deadline& deadline, std::string& why) {
  const auto n = static_cast<size_t>(transport.num_ranks());
  const auto self = static_cast<size_t>(transport.rank());
  std::unique_ptr<DeviceWindow> window(new DeviceWindow(device, transport.num_ranks()));
  Offer mine;
  int32_t own_fd = -1;
  Verdict verdict;
  if (device.table().export_memory(memory.data, &mine.handle, &own_fd) != 0) {
    verdict.set(device.table().last_error());
  }
  const Fd exported(own_fd);
  mine.handle.nbytes = std::max<uint64_t>(mine.handle.nbytes, memory.nbytes);
  mine.address = reinterpret_cast<uint64_t>(memory.data);
  mine.keep_alive = reinterpret_cast<uint64_t>(&memory.keep_alive);
  mine.index = device.index();
  std::vector<Offer> offers(n);
  gather(&mine, offers.data(), sizeof(mine));

  const bool threads = transport.shares_address_space();
  std::vector<Fd> fds(n);
  bool all_fds = !threads;
  for (const Offer& offer : offers) {
    all_fds = all_fds && offer.handle.kind == DeviceHandleKind::kFd;
  }
  if (all_fds && n > 1) fds = pass_descriptors(transport, exported.get(), gather, deadline);
  for (size_t rank = 0; rank < n; ++rank) {
    const Offer& offer = offers[rank];
    window->nbytes_[rank] = offer.handle.nbytes - offer.handle.offset;
    if (rank == self || threads) {
      window->bases_[rank] = reinterpret_cast<std::byte*>(offer.address);
      window->kept_.push_back(
          rank == self ? memory.keep_alive
                       : *reinterpret_cast<const std::shared_ptr<void>*>(offer.keep_alive));
      if (verdict.why[0] == 0 && offer.index != device.index() && !device.reaches(offer.index)) {
        verdict.set(device.title() + " cannot access the memory of " + device.table().name + ":" +
                    std::to_string(offer.index));
      }
      continue;
    }
    const bool can = offer.handle.kind == DeviceHandleKind::kIpc || fds[rank];
    void* base = nullptr;
    if (!can) {
      verdict.set("memory of rank " + std::to_string(rank) +
                  "'s device cannot be exported to other processes, as that of torch's expandable "
                  "segments cannot");
    } else if (device.table().import_memory(device.index(), &offer.handle, fds[rank].get(),
                                            &base) != 0) {
      verdict.set("cannot map memory of rank " + std::to_string(rank) +
                  "'s device: " + device.table().last_error());
    } else {
      window->imports_.push_back(base);
      window->bases_[rank] = static_cast<std::byte*>(base) + offer.handle.offset;
    }
  }
  // Also ensures that every rank has copied the keep_alive pointers.
  why = first_complaint(transport, verdict, gather);
  if (!why.empty()) return nullptr;
  return window;
}

std::unique_ptr<DeviceWindow> DeviceWindow::of_cpu_memory(Transport& transport,
                                                          const Device& device, size_t nbytes,
                                                          const AllGather& gather,
                                                          const Deadline& deadline) {
  const auto n = static_cast<size_t>(transport.num_ranks());
  const auto self = static_cast<size_t>(transport.rank());
  std::unique_ptr<DeviceWindow> window(new DeviceWindow(device, transport.num_ranks()));
  window->on_host_ = true;
  std::fill(window->nbytes_.begin(), window->nbytes_.end(), nbytes);
  window->cpu_bases_.resize(n);
  const Fd memory = create_shared_memory(nbytes);
  const auto own = std::make_shared<HostRegion>(device, memory.get(), nbytes);
  std::shared_ptr<void> keep_alive = own;
  if (transport.shares_address_space()) {
    Offer mine;
    mine.address = reinterpret_cast<uint64_t>(own->on_device());
    mine.cpu_address = reinterpret_cast<uint64_t>(own->base());
    mine.keep_alive = reinterpret_cast<uint64_t>(&keep_alive);
    std::vector<Offer> offers(n);
    gather(&mine, offers.data(), sizeof(mine));
    for (size_t rank = 0; rank < n; ++rank) {
      window->bases_[rank] = reinterpret_cast<std::byte*>(offers[rank].address);
      window->cpu_bases_[rank] = reinterpret_cast<std::byte*>(offers[rank].cpu_address);
      window->kept_.push_back(
          *reinterpret_cast<const std::shared_ptr<void>*>(offers[rank].keep_alive));
    }
  } else {
    const std::vector<Fd> fds = pass_descriptors(transport, memory.get(), gather, deadline);
    for (size_t rank = 0; rank < n; ++rank) {
      const auto region =
          rank == self ? own : std::make_shared<HostRegion>(device, fds[rank].get(), nbytes);
      window->bases_[rank] = region->on_device();
      window->cpu_bases_[rank] = region->base();
      window->kept_.push_back(region);
    }
  }
  const std::string why = first_complaint(transport, {}, gather);
  if (!why.empty()) throw CudaError(why);
  return window;
}

std::string DeviceWindow::test(Transport& transport, const AllGather& gather) const {
  const auto n = static_cast<size_t>(transport.num_ranks());
  const auto self = static_cast<size_t>(transport.rank());
  const DeviceTable& table = device_.table();
  const Stream stream(device_);
  const PinnedMemory found_memory(device_, DeviceWords::kMax * sizeof(uint64_t));
  const auto* const found = reinterpret_cast<const uint64_t*>(found_memory.data());
  Verdict verdict;
  const auto run = [&](int status) {
    if (verdict.why[0] != 0) return;
    if (status != 0 || table.synchronize_stream(device_.index(), stream.get()) != 0) {
      verdict.set(table.last_error());
    }
  };
  DeviceWords sent;   // of this rank, at all ranks
  DeviceWords owned;  // of all ranks, at this rank
  sent.num = owned.num = static_cast<int32_t>(n);
  for (size_t peer = 0; peer < n; ++peer) {
    sent.at[peer] = reinterpret_cast<uint64_t*>(bases_[peer]) + self;
    sent.value[peer] = word_of(self, peer);
    owned.at[peer] = reinterpret_cast<uint64_t*>(bases_[self]) + peer;
    owned.value[peer] = word_of(peer, self);
  }
  run(table.store_words(device_.index(), &sent, stream.get()));
  // All ranks have stored their words afterwards, so a kernel need not wait for another one.
  const std::string why = first_complaint(transport, verdict, gather);
  if (!why.empty()) return why;
  run(table.await_words(device_.index(), &owned, kTestNs,
                        reinterpret_cast<uint64_t*>(found_memory.data()), stream.get()));
  for (size_t peer = 0; peer < n && verdict.why[0] == 0; ++peer) {
    if (found[peer] == owned.value[peer]) continue;
    verdict.set("a word that a kernel of rank " + std::to_string(peer) + " stored in memory of " +
                device_.title() + " did not arrive");
  }
  std::fill_n(owned.value, n, uint64_t{0});
  run(table.store_words(device_.index(), &owned, stream.get()));
  return first_complaint(transport, verdict, gather);
}

}  // namespace pycoll
