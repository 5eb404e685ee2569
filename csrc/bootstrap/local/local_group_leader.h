// Rank 0's side of form_local_group.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "bootstrap/local/local_group.h"
#include "bootstrap/local/local_group_messages.h"
#include "bootstrap/local/packet_socket.h"
#include "bootstrap/local/silent_processes.h"

namespace pycoll {

class LocalGroupLeader {
 public:
  LocalGroupLeader(const std::string& socket_name, int num_ranks, size_t shared_bytes,
                   const std::string& token);

  /// Waits for all ranks, and sends the outcome to each.
  LocalGroup form(const Deadline& deadline, const PrepareMemory& prepare, Pidfds known);

 private:
  struct Joiner {
    Fd socket;
    Fd pidfd;
    pid_t pid = -1;
  };
  struct PendingPeer {
    Fd socket;
    pid_t pid = -1;
  };

  void gather(const Deadline& deadline);
  void accept_pending();
  /// Reads the hello of `peer`, and makes it a joiner or closes its connection.
  void hear_hello(PendingPeer peer);
  /// Handles input from a joiner, which can only mean that it has given up or died.
  void hear_joiner(int rank, const Deadline& deadline);
  std::vector<pid_t> pids() const;
  LocalGroup welcome_all(const Deadline& deadline, Pidfds known);
  std::vector<int> missing_ranks() const;
  GroupFailure timeout_after(double timeout_s) const;
  GroupFailure death_of(int rank) const;
  /// Fails if the missing ranks can only be processes that ended before they said their rank.
  void blame_ended();
  /// Tells the others of a death that only this rank's caller watches for: a newcomer to the group
  /// does not know the processes of its members.
  void check_interrupt(const Deadline& deadline);
  /// Raises the failure on all ranks that have connected.
  [[noreturn]] void fail(const GroupFailure& failure);

  const int num_ranks_;
  const size_t shared_bytes_;
  const std::string& token_;
  Fd memory_;
  Fd listener_;
  std::vector<Joiner> joiners_;       // by rank; without a socket until the rank arrives
  std::vector<PendingPeer> pending_;  // connected, hello not read yet; oldest first
  SilentProcesses silent_;
};

}  // namespace pycoll
