// Ranks as threads of one process: for tests, notebooks, and several ranks on one device.
//
// A world is created once and passed to every thread. The first member that asks its parent for the
// id of a sub-world creates it.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "bootstrap/local/local_group.h"
#include "bootstrap/local/process_info.h"
#include "transport/memory/mapping.h"
#include "transport/transport.h"

namespace pycoll {

class LocalWorld {
 public:
  LocalWorld(int num_ranks, std::string name, std::string_view text = {})
      : num_ranks_(num_ranks),
        num_users_(num_ranks),
        name_(std::move(name)),
        memory_(create_shared_memory(SegmentLayout::for_ranks(num_ranks).total_bytes)),
        mapping_(memory_.get(), SegmentLayout::for_ranks(num_ranks).total_bytes) {
    // A top-level world: its name is unique on this host while it lives.
    if (name_.empty()) {
      name_ = "threads-" + std::to_string(::getpid()) + "-" +
              std::to_string(reinterpret_cast<uintptr_t>(mapping_.base()) >> 12);
    }
    constexpr pid_t kThisThread = 0;
    const SegmentSettings settings = {num_usable_cores({&kThisThread, 1}),
                                      static_cast<uint32_t>(text.size())};
    std::byte* to = mapping_.base() + SegmentLayout::for_ranks(num_ranks).settings;
    std::memcpy(to, &settings, sizeof(settings));
    text.copy(reinterpret_cast<char*>(to + sizeof(settings)), text.size());
  }

  int num_ranks() const { return num_ranks_; }
  const std::string& name() const { return name_; }
  std::byte* base() const { return mapping_.base(); }

  /// One rank no longer uses the memory. Each rank calls this at most once.
  void leave() {
    if (--num_users_ != 0 || !mapping_.release()) return;
    memory_.reset();
  }

  std::shared_ptr<LocalWorld> child(const std::string& id, int num_ranks) {
    const std::lock_guard lock(mutex_);
    Child& child = children_[id];
    if (child.world == nullptr) {
      child = {std::make_shared<LocalWorld>(num_ranks, name_ + "." + id), num_ranks};
    }
    std::shared_ptr<LocalWorld> world = child.world;
    if (--child.missing == 0) children_.erase(id);  // each member now holds it
    return world;
  }

 private:
  struct Child {
    std::shared_ptr<LocalWorld> world;
    int missing = 0;
  };

  int num_ranks_;
  std::atomic<int> num_users_;
  std::string name_;
  Fd memory_;  // threads do not need it, but `pycoll doctor` finds the mapping by it
  Mapping mapping_;
  std::mutex mutex_;
  std::map<std::string, Child> children_;
};

namespace {

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<LocalWorld> world, int rank)
      : world_(std::move(world)), rank_(rank), segment_(world_->base(), world_->num_ranks()) {}

  std::string_view name() const override { return "local"; }
  std::string group_name() const override { return world_->name(); }
  int rank() const override { return rank_; }
  int num_ranks() const override { return world_->num_ranks(); }
  Segment& segment() override { return segment_; }
  std::shared_ptr<SharedHeap> heap() override { return nullptr; }
  bool shares_address_space() const override { return true; }
  pid_t pid(int) const override { return ::getpid(); }
  // A thread cannot end without its process; one that leaves says so in its RankControl.
  std::optional<int> ended_by(int, Look) override { return std::nullopt; }

  std::unique_ptr<Transport> make_subgroup(std::span<const int> members, const std::string& id,
                                           const Deadline&) override {
    int rank = 0;
    while (members[rank] != rank_) ++rank;
    return make_local_transport(world_->child(id, static_cast<int>(members.size())), rank);
  }

  void release() override { world_->leave(); }

 private:
  std::shared_ptr<LocalWorld> world_;
  int rank_;
  Segment segment_;
};

}  // namespace

std::shared_ptr<LocalWorld> make_local_world(int num_ranks, std::string_view settings) {
  return std::make_shared<LocalWorld>(num_ranks, "", settings);
}

std::unique_ptr<Transport> make_local_transport(std::shared_ptr<LocalWorld> world, int rank) {
  return std::make_unique<LocalTransport>(std::move(world), rank);
}

}  // namespace pycoll
