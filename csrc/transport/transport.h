// What memory or wire the links of a communicator are. One file per transport.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "bootstrap/join/host_table.h"
#include "transport/memory/heap.h"
#include "transport/net/wire.h"
#include "transport/ring/segment.h"

namespace pycoll {

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  /// Of the group, on this host: that of the job, and how it was split. Alike on all its ranks.
  virtual std::string group_name() const = 0;
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;
  /// Shared with all peers; valid as long as the transport lives.
  virtual Segment& segment() = 0;
  /// Memory that all ranks reach; null where there is none. Shared with the groups made from this
  /// transport, and alive as long as somebody uses it.
  virtual std::shared_ptr<SharedHeap> heap() = 0;
  /// Ranks are threads: an address means the same to all.
  virtual bool shares_address_space() const = 0;
  /// The process of `peer`, as this process may call it; 0 when it has no number here.
  virtual pid_t pid(int peer) const = 0;
  /// The signal that ended the process of `peer`, 0 when it ended in a way that is not known,
  /// nothing while it lives; kConnectionLost and kSilent for one on another host. Called by slow
  /// waits only: may make system calls.
  static constexpr int kConnectionLost = 254;
  static constexpr int kSilent = 255;
  virtual std::optional<int> ended_by(int peer) = 0;
  /// `peer` has left, and all that it sent to this rank is here.
  virtual bool has_left(int peer) { return load_acquire(segment().control(peer).state) == 2; }
  /// A transport among `members` (ranks of this one, in their new order), all of which call this
  /// with the same `id`, unique in the life of this transport.
  virtual std::unique_ptr<Transport> make_subgroup(std::span<const int> members,
                                                   const std::string& id,
                                                   const Deadline& deadline) = 0;
  /// Place of `rank` among the ranks of its host, and what that is called; "" where all share one.
  virtual int host_rank(int rank) const { return rank; }
  virtual std::string host_of(int) const { return ""; }
  /// Hosts are numbered by their first ranks.
  virtual int host_number(int) const { return 0; }
  /// After how long a rank of another host that says nothing counts as lost; seconds.
  virtual double silence_s() const { return 0; }
  /// In a forked process: lets go of what it shares with its parent, without a word to anyone.
  virtual void disown() {}
  /// This rank has left, and none of its threads is within an operation: gives back the memory, as
  /// soon as no other rank of this process uses it, and the descriptors. What heap() gave lives on
  /// as long as somebody has it. Only name(), rank() and num_ranks() may be asked from now on.
  virtual void release() = 0;
};

/// Ranks as threads of one process. Every thread passes the same world. `settings`: for
/// Segment::settings_text.
class LocalWorld;
std::shared_ptr<LocalWorld> make_local_world(int num_ranks, std::string_view settings = {});
std::unique_ptr<Transport> make_local_transport(std::shared_ptr<LocalWorld> world, int rank);

/// Ranks as processes of one host: a memfd that the first rank makes and passes over a Unix socket.
/// `name` is unique on the host, `token` shared by the ranks and nobody else. The first rank's
/// `settings` are those of all.
std::unique_ptr<Transport> make_shm_transport(const std::string& name, int rank, int num_ranks,
                                              const std::string& token, const Deadline& deadline,
                                              std::string_view settings = {});

/// Ranks on several hosts: shared memory within each (as above), connections between them
/// (transport/proxy/proxy.h). `world` is the same on all ranks, but for the settings, which are
/// rank 0's.
struct HostsWorld {
  std::string name;  // of the session
  std::string token;
  HostTable hosts;
  std::string settings;
};
struct LinkRules {
  double silence_s = 0;    // 0: nobody counts as lost for being silent
  bool background = true;  // a thread may move frames on while nobody waits
};
std::unique_ptr<Transport> make_hosts_transport(HostsWorld world, int rank,
                                                std::unique_ptr<Wire> wire, const LinkRules& rules,
                                                const Deadline& deadline);

}  // namespace pycoll
