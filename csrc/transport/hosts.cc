// Ranks on several hosts: each host has its own shared memory, laid out for all ranks of the
// communicator, and every rank has a proxy between that memory and the ranks of other hosts.
#include <unistd.h>

#include <algorithm>
#include <set>
#include <vector>

#include "base/error.h"
#include "bootstrap/join/joining.h"
#include "bootstrap/local/local_group.h"
#include "bootstrap/local/process_info.h"
#include "transport/memory/mapping.h"
#include "transport/proxy/proxy.h"
#include "transport/transport.h"

namespace pycoll {
namespace {

void write_settings(int memory, int num_cores, size_t offset, std::string_view text) {
  const SegmentSettings settings = {num_cores, static_cast<uint32_t>(text.size())};
  std::string bytes(reinterpret_cast<const char*>(&settings), sizeof(settings));
  bytes += text;
  if (::pwrite(memory, bytes.data(), bytes.size(), static_cast<off_t>(offset)) !=
      static_cast<ssize_t>(bytes.size())) {
    throw_system_error("write to a communicator's shared memory");
  }
}

/// FNV-1a: identical on all ranks, which std::hash does not guarantee.
uint64_t hash_name(std::string_view name) {
  uint64_t hash = 1469598103934665603ull;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211ull;
  return hash;
}

/// State that all communicators of a session share on this rank.
struct Session {
  HostsWorld world;
  std::shared_ptr<HostLinks> host_links;
};

class HostsTransport final : public Transport {
 public:
  HostsTransport(std::shared_ptr<Session> session, std::string name, int rank,
                 std::vector<int> members, const Deadline& deadline, Pidfds known)
      : session_(std::move(session)),
        name_(std::move(name)),
        rank_(rank),
        members_(std::move(members)),
        num_ranks_(static_cast<int>(members_.size())),
        group_(form(deadline, std::move(known))),
        mapping_(group_.memory.get(), layout().total_bytes),
        segment_(mapping_.base(), num_ranks_, layout().several_hosts),
        proxy_(session_->host_links, segment_, rank, members_, remote_ranks(), hash_name(name_)) {
    segment_.set_proxy(&proxy_);
    proxy_.say_joined();
    wait_for_all(deadline);
  }

  std::string_view name() const override { return session_->host_links->wire_name(); }
  std::string group_name() const override { return name_; }
  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  Segment& segment() override { return segment_; }
  std::shared_ptr<SharedHeap> heap() override { return nullptr; }
  bool shares_address_space() const override { return false; }
  pid_t pid(int peer) const override {
    return is_here(peer) ? group_.pids[static_cast<size_t>(host_rank(peer))] : 0;
  }
  int host_rank(int rank) const override {
    return static_cast<int>(std::count_if(members_.begin(), members_.begin() + rank, [&](int one) {
      return world_host(one) == world_host(members_[static_cast<size_t>(rank)]);
    }));
  }
  std::string host_of(int rank) const override {
    return session_->world.hosts.name_of(members_[static_cast<size_t>(rank)]);
  }
  int host_number(int rank) const override {
    std::vector<int> seen;  // host numbers of the world
    for (int one = 0;; ++one) {
      const int host = world_host(members_[static_cast<size_t>(one)]);
      const auto found = std::find(seen.begin(), seen.end(), host);
      if (one == rank) return static_cast<int>(found - seen.begin());
      if (found == seen.end()) seen.push_back(host);
    }
  }
  double silence_s() const override { return session_->host_links->silence_s(); }

  bool has_left(int peer) override {
    return is_here(peer) ? Transport::has_left(peer) : proxy_.has_left(peer);
  }

  std::optional<int> ended_by(int peer, Look look) override {
    if (is_here(peer)) {
      return pycoll::ended_by(group_.pidfds[static_cast<size_t>(host_rank(peer))]->get(), look);
    }
    switch (proxy_.state_of(peer)) {
      case HostLinks::Peer::kGone:
        return kConnectionLost;
      case HostLinks::Peer::kSilent:
        return kSilent;
      case HostLinks::Peer::kRejected:
        return kInvalidFrame;
      case HostLinks::Peer::kFull:
        return kDoesNotRead;
      default:
        return std::nullopt;
    }
  }

  std::unique_ptr<Transport> make_subgroup(std::span<const int> members, const std::string& id,
                                           const Deadline& deadline) override {
    std::vector<int> of_world;
    Pidfds known;  // of the members on this host
    int rank = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      of_world.push_back(members_[static_cast<size_t>(members[i])]);
      if (is_here(members[i])) {
        known.push_back(group_.pidfds[static_cast<size_t>(host_rank(members[i]))]);
      }
      if (members[i] == rank_) rank = static_cast<int>(i);
    }
    const std::string name = name_ + "." + id;
    const Deadline watched = deadline.with([&] { check_alive(members); });
    const bool one_host = std::all_of(of_world.begin(), of_world.end(), [&](int one) {
      return world_host(one) == world_host(of_world.front());
    });
    if (one_host) {
      return make_shm_transport(name, rank, static_cast<int>(members.size()), session_->world.token,
                                watched, {}, std::move(known));
    }
    return std::make_unique<HostsTransport>(session_, name, rank, std::move(of_world), watched,
                                            std::move(known));
  }

  void disown() override { session_->host_links->disown(); }

  void release() override {
    proxy_.close();
    mapping_.release();
    group_.memory.reset();
    group_.pidfds.clear();
  }

 private:
  int world_host(int world_rank) const {
    return session_->world.hosts.host_of[static_cast<size_t>(world_rank)];
  }
  bool is_here(int rank) const {
    return world_host(members_[static_cast<size_t>(rank)]) ==
           world_host(members_[static_cast<size_t>(rank_)]);
  }
  RankSet remote_ranks() const {
    RankSet remote;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      remote[static_cast<size_t>(rank)] = !is_here(rank);
    }
    return remote;
  }

  SegmentLayout layout() const {
    std::set<int> hosts;
    for (const int member : members_) hosts.insert(world_host(member));
    return SegmentLayout::for_ranks(num_ranks_, hosts.size() > 1);
  }

  /// Creates or maps the memory shared with the other ranks of this host.
  LocalGroup form(const Deadline& deadline, Pidfds known) {
    check_num_ranks(num_ranks_);
    const SegmentLayout layout = this->layout();
    int num_here = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) num_here += is_here(rank);
    // Identical on all hosts, so that all ranks choose the same algorithm.
    const int num_cores = session_->world.hosts.num_cores(members_);
    return form_local_group(
        name_, host_rank(rank_), num_here, layout.total_bytes, session_->world.token, deadline,
        [&](int memory, std::span<const pid_t>) {
          write_settings(memory, num_cores, layout.settings, session_->world.settings);
        },
        std::move(known));
  }

  void wait_for_all(const Deadline& deadline) {
    for (;;) {
      std::vector<int> missing;
      {
        const std::lock_guard lock(session_->host_links->mutex());
        missing = proxy_.missing();
      }
      if (missing.empty()) return;
      deadline.check_interrupt();
      for (const int rank : missing) {
        if (proxy_.state_of(rank) == HostLinks::Peer::kThere) continue;
        const bool rejected = proxy_.state_of(rank) == HostLinks::Peer::kRejected;
        throw PeerDiedError("rank " + std::to_string(rank) + " on host " + host_of(rank) +
                                (rejected ? " sent an invalid frame" : " ended") +
                                " while the ranks were joining",
                            rank, 0);
      }
      if (deadline.expired()) {
        throw TimeoutError(did_not_join(missing, num_ranks_, deadline.timeout_s()));
      }
      proxy_.poll(missing.front());
      proxy_.nap(1'000'000);
    }
  }

  std::shared_ptr<Session> session_;
  std::string name_;
  int rank_;
  std::vector<int> members_;  // ranks of the world
  int num_ranks_;
  LocalGroup group_;  // the members on this host
  Mapping mapping_;
  Segment segment_;
  Proxy proxy_;
};

}  // namespace

std::unique_ptr<Transport> make_hosts_transport(HostsWorld world, int rank,
                                                std::unique_ptr<Wire> wire, const LinkRules& rules,
                                                const Deadline& deadline) {
  const int num_ranks = static_cast<int>(world.hosts.host_of.size());
  std::vector<int> peers;
  std::vector<int> members;
  for (int peer = 0; peer < num_ranks; ++peer) {
    members.push_back(peer);
    if (world.hosts.host_of[static_cast<size_t>(peer)] !=
        world.hosts.host_of[static_cast<size_t>(rank)]) {
      peers.push_back(peer);
    }
  }
  auto session = std::make_shared<Session>();
  session->world = std::move(world);
  session->host_links = std::make_shared<HostLinks>(std::move(wire), num_ranks, peers,
                                                    rules.silence_s, rules.background);
  const std::string name = session->world.name;
  return std::make_unique<HostsTransport>(std::move(session), name, rank, std::move(members),
                                          deadline, Pidfds());
}

}  // namespace pycoll
