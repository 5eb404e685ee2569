// Which library of MPI this process uses, and of which ABI it is.
#pragma once

#include <string>

namespace pycoll {

inline constexpr const char* kMpiVariable = "PYCOLL_MPI";

struct MpiLibrary {
  void* handle = nullptr;  // of dlopen; never closed
  std::string path;
  std::string abi;      // "abi": the standard one of MPI 5; "mpich": MPICH's older one; "openmpi"
  std::string problem;  // what was tried, when there is none
};

/// The first there is of: the file that PYCOLL_MPI names; a library that is in the process already;
/// that of the launcher that started this process; one in `folder`; the system's. The first two
/// count whatever their ABI; of the others, those with the standard ABI.
MpiLibrary find_mpi_library(const std::string& folder);

}  // namespace pycoll
