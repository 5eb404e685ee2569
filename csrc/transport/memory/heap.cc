#include "transport/memory/heap.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "base/pages.h"
#include "transport/memory/mapping.h"

namespace pycoll {
namespace {

constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older libc headers lack
// x86-64 and arm64 give a process at least 128 TiB; other mappings must fit too.
constexpr size_t kMaxTotalBytes = size_t{16} << 40;

}  // namespace

size_t SharedHeap::area_bytes(int num_ranks) {
  for (const auto resource : {RLIMIT_AS, RLIMIT_FSIZE}) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return 0;
  }
  const auto memory = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * kPage;
  return std::min(round_up(memory, kLargePage),
                  kMaxTotalBytes / static_cast<size_t>(num_ranks) / kLargePage * kLargePage);
}

std::shared_ptr<SharedHeap> SharedHeap::map(const Fd& memory, size_t file_offset, int rank,
                                            int num_ranks) {
  const size_t area = area_bytes(num_ranks);
  if (area == 0) return nullptr;
  Fd own(::fcntl(memory.get(), F_DUPFD_CLOEXEC, 0));
  if (!own) return nullptr;
  // Aligned to a large page, as in the file, so that large pages can be mapped as such. Unmap the
  // rest on both sides.
  const size_t nbytes = area * static_cast<size_t>(num_ranks);
  void* reserved = ::mmap(nullptr, nbytes + kLargePage, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const start = static_cast<std::byte*>(reserved);
  const size_t before = -reinterpret_cast<uintptr_t>(start) % kLargePage;
  void* base =
      ::mmap(start + before, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
             own.get(), static_cast<off_t>(file_offset));
  if (base == MAP_FAILED) {
    ::munmap(reserved, nbytes + kLargePage);
    return nullptr;
  }
  if (before != 0) ::munmap(start, before);
  ::munmap(start + before + nbytes, kLargePage - before);
  ::madvise(base, nbytes, MADV_DONTDUMP);
  return std::shared_ptr<SharedHeap>(new SharedHeap(
      std::move(own), file_offset, static_cast<std::byte*>(base), area, rank, num_ranks));
}

SharedHeap::SharedHeap(Fd memory, size_t file_offset, std::byte* base, size_t area_bytes, int rank,
                       int num_ranks)
    : memory_(std::move(memory)),
      pid_(::getpid()),
      file_offset_(file_offset),
      base_(base),
      area_bytes_(area_bytes),
      num_ranks_(num_ranks),
      own_(base + static_cast<size_t>(rank) * area_bytes) {}

SharedHeap::~SharedHeap() { ::munmap(base_, area_bytes_ * static_cast<size_t>(num_ranks_)); }

void SharedHeap::enter() {
  const std::lock_guard lock(mutex_);
  ++num_transports_;
}

void SharedHeap::leave() {
  const std::lock_guard lock(mutex_);
  if (--num_transports_ == 0) memory_.reset();
}

std::byte* SharedHeap::allocate(size_t nbytes) {
  // Whole pages, so that free() can return them; aligned to large pages if they fit.
  const size_t wanted = round_up(std::max<size_t>(nbytes, 1), kPage);
  const size_t alignment = wanted >= kLargePage ? kLargePage : kPage;
  const std::lock_guard lock(mutex_);
  size_t start = 0;  // first fit, in address order
  for (const auto& [memory, size] : taken_) {
    const auto taken_at = static_cast<size_t>(memory - own_);
    if (start + wanted <= taken_at) break;
    start = round_up(taken_at + size, alignment);
  }
  if (start + wanted > area_bytes_) {
    throw SystemError("no " + std::to_string(nbytes) + " bytes of shared memory are left: " +
                      std::to_string(area_bytes_) + " bytes of address space are taken");
  }
  // Back the pages now: without memory this fails here, instead of by a signal at first use.
  const auto file_at = static_cast<off_t>(file_offset_ + static_cast<size_t>(own_ - base_) + start);
  if (::fallocate(memory_.get(), FALLOC_FL_KEEP_SIZE, file_at, static_cast<off_t>(wanted)) != 0) {
    throw_system_error("allocation of " + std::to_string(nbytes) + " bytes of shared memory");
  }
  // Use large pages, which cover more memory per TLB entry. If none are left, or before Linux 6.1,
  // small pages remain.
  if (wanted >= kLargePage) {
    ::madvise(own_ + start, wanted / kLargePage * kLargePage, kCollapse);
  }
  return taken_.emplace(own_ + start, wanted).first->first;
}

void SharedHeap::free(std::byte* memory) {
  if (::getpid() != pid_) return;
  const std::lock_guard lock(mutex_);
  const auto found = taken_.find(memory);
  if (found == taken_.end()) return;
  if (withdrawn_.count(memory) != 0) {
    ::madvise(memory, found->second, MADV_DONTNEED);
    return;
  }
  ::madvise(memory, found->second,
            MADV_REMOVE);  // punches a hole in the file, for all ranks that map it
  taken_.erase(found);
}

std::map<std::byte*, size_t>::const_iterator SharedHeap::allocation_of(const std::byte* p) const {
  auto after = taken_.upper_bound(const_cast<std::byte*>(p));
  if (after == taken_.begin()) return taken_.end();
  --after;
  return p < after->first + after->second ? after : taken_.end();
}

bool SharedHeap::is_withdrawn(const void* p) const {
  const std::lock_guard lock(mutex_);
  const auto found = allocation_of(static_cast<const std::byte*>(p));
  return found != taken_.end() && withdrawn_.count(found->first) != 0;
}

void SharedHeap::withdraw(std::byte* p) {
  bool ok = true;
  if (!contains(p, 0)) {
    ok = registered_.withdraw(p);
  } else {
    const std::lock_guard lock(mutex_);
    const auto found = allocation_of(p);
    if (found == taken_.end()) return;
    ok = become_private(found->first, found->second);
    if (ok) withdrawn_.insert(found->first);
    has_withdrawn_ = true;
  }
  if (!ok) throw_system_error("moving an array out of shared memory, which late ranks may write");
}

bool SharedHeap::map_at(std::byte* place, std::byte* memory, size_t nbytes) {
  const size_t file_at = file_offset_ + static_cast<size_t>(memory - base_);
  return ::mmap(place, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory_.get(),
                static_cast<off_t>(file_at)) != MAP_FAILED;
}

size_t SharedHeap::allocated_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (const auto& [memory, size] : taken_) total += size;
  return total;
}

}  // namespace pycoll
