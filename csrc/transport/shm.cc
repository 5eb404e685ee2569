// Ranks as processes of one host, over one memfd: nothing in /dev/shm, nothing that outlives them.
#include <unistd.h>

#include <vector>

#include "bootstrap/local_group.h"
#include "bootstrap/process_info.h"
#include "transport/mapping.h"
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
  ShmTransport(std::string name, int rank, int num_ranks, std::string token,
               const Deadline& deadline, std::string_view settings)
      : name_(std::move(name)),
        token_(std::move(token)),
        rank_(rank),
        group_(form_local_group(
            name_, rank, num_ranks, SegmentLayout::for_ranks(num_ranks).total_bytes, token_,
            deadline,
            [&](int memory, std::span<const pid_t> pids) {
              write_settings(memory, pids, SegmentLayout::for_ranks(num_ranks).settings, settings);
            })),
        mapping_(group_.memory.get(), SegmentLayout::for_ranks(num_ranks).total_bytes),
        segment_(mapping_.base(), num_ranks) {
    group_.memory.reset();  // the mapping keeps the memory alive
  }

  std::string_view name() const override { return "shm"; }
  std::string group_name() const override { return name_; }
  int rank() const override { return rank_; }
  int num_ranks() const override { return segment_.num_ranks(); }
  Segment& segment() override { return segment_; }

  std::optional<int> ended_by(int peer) override {
    const int pidfd = group_.pidfds[static_cast<size_t>(peer)].get();
    if (!process_ended(pidfd)) return std::nullopt;
    return exit_signal(pidfd);
  }

  std::unique_ptr<Transport> make_subgroup(std::span<const int> members, const std::string& id,
                                           const Deadline& deadline) override {
    int rank = 0;
    while (members[rank] != rank_) ++rank;
    return make_shm_transport(name_ + "." + id, rank, static_cast<int>(members.size()), token_,
                              deadline);
  }

 private:
  std::string name_;
  std::string token_;
  int rank_;
  LocalGroup group_;
  Mapping mapping_;
  Segment segment_;
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport(const std::string& name, int rank, int num_ranks,
                                              const std::string& token, const Deadline& deadline,
                                              std::string_view settings) {
  return std::make_unique<ShmTransport>(name, rank, num_ranks, token, deadline, settings);
}

}  // namespace pycoll
