// Transports: the memory and wires that link the ranks of a communicator. One file per transport.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"
#include "bootstrap/join/host_table.h"
#include "bootstrap/local/local_group.h"
#include "bootstrap/local/process_info.h"
#include "transport/memory/heap.h"
#include "transport/net/wire.h"
#include "transport/ring/segment.h"

namespace pycoll {

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  /// Identifies the group on this host: the job's name, then its splits. Equal on all its ranks.
  virtual std::string group_name() const = 0;
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;
  /// The memory shared with all peers; valid as long as the transport lives.
  virtual Segment& segment() = 0;
  /// Memory that all ranks reach; null if there is none. The groups made from this transport share
  /// it, and it lives as long as it has a user.
  virtual std::shared_ptr<SharedHeap> heap() = 0;
  /// Whether the ranks are threads of one process, so that an address is valid on all of them.
  virtual bool shares_address_space() const = 0;
  /// The pid of `peer` in the pid namespace of this process; 0 if it has none here.
  virtual pid_t pid(int peer) const = 0;
  /// The signal that ended the process of `peer`; 0 if it ended for an unknown reason; nothing
  /// while it lives. For a peer on another host, one of the constants below. Makes system calls, so
  /// only slow waits call it.
  static constexpr int kDoesNotRead = 252;   // the peer, so its connection was closed
  static constexpr int kInvalidFrame = 253;  // the peer sent one, so its connection was closed
  static constexpr int kConnectionLost = 254;
  static constexpr int kSilent = 255;
  virtual std::optional<int> ended_by(int peer, Look look) = 0;
  /// Whether `peer` has left and everything that it sent to this rank has arrived.
  virtual bool has_left(int peer) { return load_acquire(segment().control(peer).state) == 2; }
  /// Raises PeerDiedError if the process of one of `ranks` has ended. May make system calls.
  void check_alive(std::span<const int> ranks, Look look = Look::kQuick) {
    for (const int rank : ranks) {
      const std::optional<int> signal = ended_by(rank, look);
      if (!signal) continue;
      const bool is_known = *signal != 0 && *signal < kDoesNotRead;
      throw PeerDiedError(
          "rank " + std::to_string(rank) + " of " + std::to_string(num_ranks()) +
              (is_known ? " was ended by signal " + std::to_string(*signal) : " ended") +
              " while the ranks of a new communicator were joining",
          rank, is_known ? *signal : 0);
    }
  }
  /// Creates a transport among `members` (ranks of this one, in their new order). All members call
  /// this with the same `id`, which is unique in the life of this transport. Raises PeerDiedError
  /// with the rank in this transport if a member ends meanwhile.
  virtual std::unique_ptr<Transport> make_subgroup(std::span<const int> members,
                                                   const std::string& id,
                                                   const Deadline& deadline) = 0;
  /// Index of `rank` among the ranks of its host.
  virtual int host_rank(int rank) const { return rank; }
  /// Name of the rank's host; "" if all ranks share one host.
  virtual std::string host_of(int) const { return ""; }
  /// Number of the rank's host; hosts are numbered in the order of their first ranks.
  virtual int host_number(int) const { return 0; }
  /// Seconds of silence after which a rank of another host counts as lost.
  virtual double silence_s() const { return 0; }
  /// In a forked process: gives up what it shares with its parent, without sending anything.
  virtual void disown() {}
  /// Frees the memory, once no other rank of this process uses it, and the descriptors. Called
  /// after this rank has left, when none of its threads is within an operation. The object of
  /// heap() lives on while it has an owner. Afterwards only name(), rank() and num_ranks() may be
  /// called.
  virtual void release() = 0;
};

/// Ranks as threads of one process. Every thread passes the same world. `settings` becomes
/// Segment::settings_text.
class LocalWorld;
std::shared_ptr<LocalWorld> make_local_world(int num_ranks, std::string_view settings = {});
std::unique_ptr<Transport> make_local_transport(std::shared_ptr<LocalWorld> world, int rank);

/// Ranks as processes of one host: a memfd that the first rank creates and passes over a Unix
/// socket. `name` is unique on the host; only the ranks know `token`. The first rank's `settings`
/// apply to all ranks. `known`: the ranks' processes, as for form_local_group().
std::unique_ptr<Transport> make_shm_transport(const std::string& name, int rank, int num_ranks,
                                              const std::string& token, const Deadline& deadline,
                                              std::string_view settings = {}, Pidfds known = {});

/// Ranks on several hosts: shared memory within each (as above), connections between them
/// (transport/proxy/proxy.h). `world` is identical on all ranks; only rank 0's settings count.
struct HostsWorld {
  std::string name;  // of the session
  std::string token;
  HostTable hosts;
  std::string settings;
};
struct LinkRules {
  double silence_s = 0;    // silence after which a peer counts as lost; 0: never
  bool background = true;  // whether a thread moves frames while no rank waits
};
std::unique_ptr<Transport> make_hosts_transport(HostsWorld world, int rank,
                                                std::unique_ptr<Wire> wire, const LinkRules& rules,
                                                const Deadline& deadline);

}  // namespace pycoll
