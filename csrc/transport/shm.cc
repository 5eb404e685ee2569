// Ranks as processes of one host, over one memfd: nothing in /dev/shm, and nothing outlives them.
#include <unistd.h>

#include <vector>

#include "base/pages.h"
#include "bootstrap/local/local_group.h"
#include "bootstrap/local/process_info.h"
#include "transport/memory/mapping.h"
#include "transport/transport.h"

namespace pycoll {
namespace {

void write_settings(int memory, std::span<const pid_t> pids, size_t offset, std::string_view text) {
  const SegmentSettings settings = {num_usable_cores(pids), static_cast<uint32_t>(text.size())};
  std::string bytes(reinterpret_cast<const char*>(&settings), sizeof(settings));
  bytes += text;
  if (::pwrite(memory, bytes.data(), bytes.size(), static_cast<off_t>(offset)) !=
      static_cast<ssize_t>(bytes.size())) {
    throw_system_error("write to a communicator's shared memory");
  }
}

class ShmTransport final : public Transport {
 public:
  /// `parent` is the transport that this one was split from, if any: both use its heap.
  ShmTransport(std::string name, int rank, int num_ranks, std::string token,
               const Deadline& deadline, std::string_view settings, ShmTransport* parent,
               Pidfds known)
      : name_(std::move(name)),
        token_(std::move(token)),
        rank_(rank),
        group_(form_local_group(
            name_, rank, num_ranks, total_bytes(num_ranks, /*with_heap=*/parent == nullptr), token_,
            deadline,
            [&](int memory, std::span<const pid_t> pids) {
              write_settings(memory, pids, SegmentLayout::for_ranks(num_ranks).settings, settings);
            },
            std::move(known))),
        mapping_(group_.memory.get(), total_bytes(num_ranks, /*with_heap=*/false)),
        segment_(mapping_.base(), num_ranks),
        heap_(parent != nullptr
                  ? parent->heap_
                  : SharedHeap::map(group_.memory, total_bytes(num_ranks, /*with_heap=*/false),
                                    rank, num_ranks)) {
    if (heap_ != nullptr) heap_->enter();
  }
  ~ShmTransport() override { leave_heap(); }

  std::string_view name() const override { return "shm"; }
  std::string group_name() const override { return name_; }
  int rank() const override { return rank_; }
  int num_ranks() const override { return segment_.num_ranks(); }
  Segment& segment() override { return segment_; }
  std::shared_ptr<SharedHeap> heap() override { return heap_; }
  bool shares_address_space() const override { return false; }
  pid_t pid(int peer) const override { return group_.pids[static_cast<size_t>(peer)]; }

  std::optional<int> ended_by(int peer, Look look) override {
    return pycoll::ended_by(group_.pidfds[static_cast<size_t>(peer)]->get(), look);
  }

  std::unique_ptr<Transport> make_subgroup(std::span<const int> members, const std::string& id,
                                           const Deadline& deadline) override {
    int rank = 0;
    while (members[rank] != rank_) ++rank;
    Pidfds known;
    for (const int member : members) known.push_back(group_.pidfds[static_cast<size_t>(member)]);
    return std::make_unique<ShmTransport>(name_ + "." + id, rank, static_cast<int>(members.size()),
                                          token_, deadline.with([&] { check_alive(members); }), "",
                                          this, std::move(known));
  }

  void release() override {
    mapping_.release();
    leave_heap();
    group_.memory.reset();
    group_.pidfds.clear();
  }

 private:
  void leave_heap() {
    if (heap_ != nullptr) heap_->leave();
    heap_.reset();
  }

  /// Size of the segment and, after it, the heap, which begins at a large page.
  static size_t total_bytes(int num_ranks, bool with_heap) {
    const size_t segment = SegmentLayout::for_ranks(num_ranks).total_bytes;
    const size_t heap_at = round_up(segment, kLargePage);
    const auto num_areas = static_cast<size_t>(with_heap ? num_ranks : 0);
    return heap_at + num_areas * SharedHeap::area_bytes(num_ranks);
  }

  std::string name_;
  std::string token_;
  int rank_;
  LocalGroup group_;  // `pycoll doctor` finds the memory by its descriptor
  Mapping mapping_;
  Segment segment_;
  std::shared_ptr<SharedHeap> heap_;
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport(const std::string& name, int rank, int num_ranks,
                                              const std::string& token, const Deadline& deadline,
                                              std::string_view settings, Pidfds known) {
  return std::make_unique<ShmTransport>(name, rank, num_ranks, token, deadline, settings, nullptr,
                                        std::move(known));
}

}  // namespace pycoll
