// The MPI of this process: found and loaded at run time, used for meeting and for links.
//
// This header names no MPI types, because handles differ between ABIs. The code that uses them is
// compiled once for each ABI whose header the build has found (mpi/api.h); the loaded library
// determines the ABI.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/net/wire.h"

namespace pycoll {

/// An MPI communicator that only pycoll uses.
class MpiComm {
 public:
  virtual ~MpiComm() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Returns the `own` bytes of all ranks, by rank. Collective. Raises TimeoutError naming the
  /// missing ranks.
  virtual std::vector<std::string> exchange(const std::string& own, const Deadline& deadline) = 0;
  /// Makes a wire to `peers`, which are ranks of this communicator. The wire keeps the
  /// communicator.
  virtual std::unique_ptr<Wire> make_wire(const std::vector<int>& peers) = 0;
};

/// How threads may call MPI.
enum class MpiThreads : uint8_t {
  kAny,         // from any thread, at least one at a time: links progress in the background
  kCallerOnly,  // the program calls MPI too, without a lock: links progress within calls only
};

class Mpi {
 public:
  virtual ~Mpi() = default;
  virtual std::string version() const = 0;
  virtual int world_rank() const = 0;
  virtual int world_size() const = 0;
  virtual MpiThreads threads() const = 0;

  /// Duplicates MPI_COMM_WORLD. Collective over its ranks.
  virtual std::shared_ptr<MpiComm> duplicate_world(const Deadline& deadline) = 0;
  /// Duplicates the MPI communicator with this C handle. Collective over its ranks.
  virtual std::shared_ptr<MpiComm> duplicate(uintptr_t handle, const Deadline& deadline) = 0;
  /// Makes a communicator of these ranks of MPI_COMM_WORLD, in this order. Collective over them; it
  /// has no deadline, because all of them have already met. `name` distinguishes concurrent calls
  /// of one process.
  virtual std::shared_ptr<MpiComm> of_members(const std::vector<int>& world_ranks,
                                              const std::string& name) = 0;

  /// Ends all wires, and MPI if pycoll started it. `in_order`: all ranks end together. Otherwise
  /// MPI is not finalized, because MPI_Finalize could wait for the other ranks forever.
  virtual void finish(bool in_order) = 0;
};

/// This process's MPI. The first call finds the library, and starts MPI unless it is running.
/// Raises MpiError with the libraries that were tried, and UsageError if MPI is running with a
/// thread level that pycoll cannot use.
Mpi& mpi();
/// This process's MPI; null unless mpi() has succeeded before. Starts nothing.
Mpi* running_mpi();

/// Adds a folder to search for the library: that of this Python environment.
void set_mpi_folder(const std::string& folder);
/// The library that mpi() uses or would use, and its ABI ("abi", "mpich", "linked"). Both are empty
/// if there is none.
struct MpiLibraryFacts {
  std::string path;
  std::string abi;
};
MpiLibraryFacts mpi_library_facts();
/// Whether the shared library at `path` uses the same MPI, so that its handles are valid here.
bool shares_mpi_with(const std::string& path);
/// The ABIs that this build supports: "abi", "abi, mpich", ...; empty: it was built without MPI.
std::string mpi_abis();

}  // namespace pycoll
