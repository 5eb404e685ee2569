// Finds the MPI library of this process, and its ABI.
#pragma once

#include <string>

namespace pycoll {

inline constexpr const char* kMpiVariable = "PYCOLL_MPI";

struct MpiLibrary {
  void* handle = nullptr;  // from dlopen; never closed
  std::string path;
  std::string abi;      // "abi": the standard one of MPI 5; "mpich": MPICH's older one; "openmpi"
  std::string problem;  // what was tried, when there is none
};

/// Returns the first library found of: the file that PYCOLL_MPI names; a library that the process
/// has already loaded; the library of the launcher that started this process; one in `folder`; the
/// system's. The first two may have any ABI, the others must have the standard one.
MpiLibrary find_mpi_library(const std::string& folder);

}  // namespace pycoll
