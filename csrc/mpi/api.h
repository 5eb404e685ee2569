// The MPI functions that pycoll uses, from the loaded library.
//
// Included by the files of this folder that are compiled once for each ABI: PYCOLL_MPI_ABI is the
// ABI's namespace, PYCOLL_MPI_HEADER its header.
#pragma once

#include PYCOLL_MPI_HEADER

#include <string>

namespace pycoll::PYCOLL_MPI_ABI {

// clang-format off
#define PYCOLL_MPI_FUNCTIONS(X)                                                               \
  X(Initialized) X(Finalized) X(Ibarrier) X(Init_thread) X(Query_thread) X(Finalize)                      \
  X(Get_library_version) X(Error_string) X(Comm_rank) X(Comm_size) X(Comm_test_inter)         \
  X(Comm_group) X(Comm_create_group) X(Comm_idup) X(Comm_free) X(Comm_set_errhandler)         \
  X(Group_incl) X(Group_free) X(Isend) X(Irecv) X(Test) X(Testsome) X(Cancel) X(Get_count)
// clang-format on

struct MpiApi {
#define PYCOLL_MPI_MEMBER(name) decltype(&MPI_##name) name = nullptr;
  PYCOLL_MPI_FUNCTIONS(PYCOLL_MPI_MEMBER)
#undef PYCOLL_MPI_MEMBER

  /// Loads the functions from a library opened by dlopen, or from the linked one if the build links
  /// an MPI. Raises MpiError naming a missing function.
  static MpiApi load(void* library, const std::string& path);

  /// Raises MpiError with MPI's error text, unless `code` is MPI_SUCCESS.
  void check(int code, const char* what) const;
  std::string text_of(int code) const;
};

}  // namespace pycoll::PYCOLL_MPI_ABI
