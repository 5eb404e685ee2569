#include "mpi/api.h"

#include <dlfcn.h>

#include "base/error.h"

namespace pycoll::PYCOLL_MPI_ABI {

MpiApi MpiApi::load([[maybe_unused]] void* library, [[maybe_unused]] const std::string& path) {
  MpiApi api;
#ifdef PYCOLL_MPI_LINKED
#define PYCOLL_MPI_TAKE(name) api.name = &MPI_##name;
#else
#define PYCOLL_MPI_TAKE(name)                                                      \
  api.name = reinterpret_cast<decltype(api.name)>(::dlsym(library, "MPI_" #name)); \
  if (api.name == nullptr) throw MpiError(path + " has no function MPI_" #name);
#endif
  PYCOLL_MPI_FUNCTIONS(PYCOLL_MPI_TAKE)
#undef PYCOLL_MPI_TAKE
  return api;
}

std::string MpiApi::text_of(int code) const {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (Error_string(code, text, &length) != MPI_SUCCESS) return "error " + std::to_string(code);
  return std::string(text, static_cast<size_t>(length));
}

void MpiApi::check(int code, const char* what) const {
  if (code != MPI_SUCCESS) throw MpiError(std::string(what) + ": " + text_of(code));
}

}  // namespace pycoll::PYCOLL_MPI_ABI
