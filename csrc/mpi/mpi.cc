#include "mpi/mpi.h"

#include <dlfcn.h>

#include <mutex>

#include "base/error.h"
#include "mpi/mpi_library.h"

namespace pycoll {

#ifdef PYCOLL_MPI_HAS_ABI
namespace abi {
std::unique_ptr<Mpi> start(void* library, const std::string& path);
}
#endif
#ifdef PYCOLL_MPI_HAS_MPICH
namespace mpich {
std::unique_ptr<Mpi> start(void* library, const std::string& path);
}
#endif
#ifdef PYCOLL_MPI_HAS_LINKED
namespace linked {
std::unique_ptr<Mpi> start(void* library, const std::string& path);
}
#endif

namespace {

/// The MPI of this process: there is only one. It is started once; all its users share its lock.
struct Process {
  std::mutex mutex;
  std::string folder;
  MpiLibrary library;
  std::unique_ptr<Mpi> mpi;
};

Process& process() {
  static Process* const one = new Process;  // never destroyed: threads may outlive main()
  return *one;
}

const MpiLibrary& library_of(Process& process) {
  if (process.library.handle == nullptr) process.library = find_mpi_library(process.folder);
  return process.library;
}

std::string linked_abi() {
#ifdef PYCOLL_MPI_HAS_LINKED
  return PYCOLL_MPI_HAS_LINKED;  // the name that mpi_library.cc uses
#else
  return "";
#endif
}

std::unique_ptr<Mpi> start(const MpiLibrary& library) {
  if (mpi_abis().empty()) {
    throw MpiError(
        "this build of pycoll has no MPI: rebuild it with mpi_abi.h installed (pip install mpich)");
  }
#ifdef PYCOLL_MPI_HAS_LINKED
  if (library.abi == linked_abi()) return linked::start(library.handle, library.path);
#endif
#ifdef PYCOLL_MPI_HAS_ABI
  if (library.abi == "abi") return abi::start(library.handle, library.path);
#endif
#ifdef PYCOLL_MPI_HAS_MPICH
  if (library.abi == "mpich") return mpich::start(library.handle, library.path);
#endif
  if (library.handle == nullptr) {
    throw MpiError("found no MPI library with the standard ABI (" + library.problem + "): set " +
                   kMpiVariable + "=/path/to/libmpi_abi.so.1");
  }
  throw MpiError(
      library.path + " has the ABI of " + library.abi + ", expected one of " + mpi_abis() +
      ": set " + kMpiVariable + "=/path/to/libmpi_abi.so.1 for another library" +
      (library.abi == "openmpi" ? ", or build with the CMake option PYCOLL_MPICC for this one"
                                : ""));
}

}  // namespace

Mpi& mpi() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  if (own.mpi == nullptr) own.mpi = start(library_of(own));
  return *own.mpi;
}

Mpi* running_mpi() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  return own.mpi.get();
}

void set_mpi_folder(const std::string& folder) {
  const std::lock_guard lock(process().mutex);
  process().folder = folder;
}

MpiLibraryFacts mpi_library_facts() {
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  const MpiLibrary& library = library_of(own);
  return {library.path, library.abi};
}

bool shares_mpi_with(const std::string& path) {
  void* other = ::dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (other == nullptr) return false;
  Process& own = process();
  const std::lock_guard lock(own.mutex);
  const MpiLibrary& library = library_of(own);
  void* const theirs = ::dlsym(other, "MPI_Isend");
  const bool same = library.handle != nullptr && theirs != nullptr &&
                    ::dlsym(library.handle, "MPI_Isend") == theirs;
  ::dlclose(other);
  return same;
}

std::string mpi_abis() {
  std::string names = linked_abi();
  const auto add = [&names](const char* name) {
    names += (names.empty() ? "" : ", ") + std::string(name);
  };
#ifdef PYCOLL_MPI_HAS_ABI
  add("abi");
#endif
#ifdef PYCOLL_MPI_HAS_MPICH
  add("mpich");
#endif
  (void)add;
  return names;
}

}  // namespace pycoll
