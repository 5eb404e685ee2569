// A running MPI, and the lock for calls of it.
//
// Compiled once for each ABI (mpi/api.h). All wires of pycoll share the lock, so that one thread at
// a time calls MPI: MPI_THREAD_SERIALIZED suffices.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "mpi/api.h"
#include "mpi/mpi.h"

namespace pycoll::PYCOLL_MPI_ABI {

class MpiWire;

/// State that the runtime shares with its communicators and wires, which check `over`.
struct Shared {
  MpiApi api;
  std::recursive_mutex mutex;
  bool over = false;         // MPI must not be called any more
  bool saw_failure = false;  // a rank may be gone
  std::set<MpiWire*> wires;
};

class Runtime final : public Mpi {
 public:
  /// Starts MPI unless it is running.
  explicit Runtime(const MpiApi& api);

  std::string version() const override { return version_; }
  int world_rank() const override { return world_rank_; }
  int world_size() const override { return world_size_; }
  MpiThreads threads() const override { return threads_; }
  std::shared_ptr<MpiComm> duplicate_world(const Deadline& deadline) override;
  std::shared_ptr<MpiComm> duplicate(uintptr_t handle, const Deadline& deadline) override;
  std::shared_ptr<MpiComm> of_members(const std::vector<int>& world_ranks,
                                      const std::string& name) override;
  void finish(bool in_order) override;

 private:
  std::shared_ptr<MpiComm> duplicate_comm(MPI_Comm comm, const Deadline& deadline);

  std::shared_ptr<Shared> shared_;
  const pid_t pid_;  // a forked process has another pid, and no MPI
  bool started_here_ = false;
  MpiThreads threads_ = MpiThreads::kAny;
  std::string version_;
  int world_rank_ = 0;
  int world_size_ = 1;
};

/// An MPI communicator that is freed with this object.
class Comm final : public MpiComm, public std::enable_shared_from_this<Comm> {
 public:
  Comm(std::shared_ptr<Shared> shared, MPI_Comm comm);
  ~Comm() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> exchange(const std::string& own, const Deadline& deadline) override;
  std::unique_ptr<Wire> make_wire(const std::vector<int>& peers) override;

  MPI_Comm get() const { return comm_; }
  const std::shared_ptr<Shared>& shared() const { return shared_; }
  /// Makes the destructor leave MPI alone: for a forked process, in which MPI does not work.
  void disown() { disowned_ = true; }

 private:
  std::shared_ptr<Shared> shared_;
  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  bool disowned_ = false;
};

/// Tests a request until it is done; false at the deadline. Lets interrupts through.
bool wait_for(Shared& shared, MPI_Request* request, MPI_Status* status, const Deadline& deadline);

std::unique_ptr<Mpi> start(void* library, const std::string& path);

}  // namespace pycoll::PYCOLL_MPI_ABI
