// The MPI of this process: found and loaded at run time, used for meeting and for links.
//
// No type of MPI is named here, because handles differ between ABIs: what uses them is compiled
// once for each ABI whose header the build has found (mpi/api.h), and the library says which it is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/net/wire.h"

namespace pycoll {

/// A communicator of MPI that is pycoll's alone.
class MpiComm {
 public:
  virtual ~MpiComm() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Every rank's `own` bytes, by rank. Collective. Raises TimeoutError naming who did not come.
  virtual std::vector<std::string> exchange(const std::string& own, const Deadline& deadline) = 0;
  /// Frames to and from `peers`, ranks of this communicator, which becomes the wire's.
  virtual std::unique_ptr<Wire> make_wire(const std::vector<int>& peers) = 0;
};

/// How threads may call MPI.
enum class MpiThreads : uint8_t {
  kAny,         // any thread, one at a time at least: links move on by themselves
  kCallerOnly,  // somebody else calls MPI too, and not thread-safely: links move within calls only
};

class Mpi {
 public:
  virtual ~Mpi() = default;
  virtual std::string version() const = 0;
  virtual int world_rank() const = 0;
  virtual int world_size() const = 0;
  virtual MpiThreads threads() const = 0;

  /// MPI_COMM_WORLD's ranks. Collective over them.
  virtual std::shared_ptr<MpiComm> duplicate_world(const Deadline& deadline) = 0;
  /// The ranks of an MPI communicator, given as the C handle that the library knows.
  virtual std::shared_ptr<MpiComm> duplicate(uintptr_t handle, const Deadline& deadline) = 0;
  /// These ranks of MPI_COMM_WORLD, in this order. Collective over them, who all have come: there
  /// is no deadline. `name` tells apart what one process does twice at a time.
  virtual std::shared_ptr<MpiComm> of_members(const std::vector<int>& world_ranks,
                                              const std::string& name) = 0;

  /// Ends all wires, and MPI where it was started here. `in_order`: the ranks end together; else
  /// they may not, and MPI's own end would wait for them.
  virtual void finish(bool in_order) = 0;
};

/// This process's MPI. The first call finds the library, and starts MPI unless somebody has.
/// Raises MpiError saying what was tried; UsageError where MPI runs and allows no use by pycoll.
Mpi& mpi();
/// The same without starting anything: null unless mpi() has been successful.
Mpi* running_mpi();

/// Where else to look for a library: the folder of this Python environment.
void set_mpi_folder(const std::string& folder);
/// The library that mpi() would use or uses, and its ABI ("abi", "mpich", "linked"); empty where
/// there is none.
struct MpiLibraryFacts {
  std::string path;
  std::string abi;
};
MpiLibraryFacts mpi_library_facts();
/// Whether the shared library in this file calls the same MPI: then they have handles in common.
bool shares_mpi_with(const std::string& path);
/// The ABIs that this build knows: "abi", "abi, mpich", ...; empty: it was built without.
std::string mpi_abis();

}  // namespace pycoll
