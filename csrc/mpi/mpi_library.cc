#include "mpi/mpi_library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/environment.h"

namespace pycoll {
namespace {

// Versioned names only: an unversioned libmpi_abi.so may be a linker script.
constexpr const char* kStandardNames[] = {"libmpi_abi.so.1", "libmpi_abi.so.0"};

std::string abi_of(void* library) {
  using GetVersion = int (*)(int*, int*);
  int major = -1;
  int minor = -1;
  const auto get_version = reinterpret_cast<GetVersion>(::dlsym(library, "MPI_Abi_get_version"));
  if (get_version != nullptr && get_version(&major, &minor) == 0 && major > 0) return "abi";
  if (::dlsym(library, "ompi_mpi_comm_world") != nullptr) return "openmpi";
  return ::dlsym(library, "MPI_Comm_create_group") != nullptr ? "mpich" : "";
}

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

/// Paths of the MPI libraries that the process has loaded, those of the standard ABI first.
std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  const auto visit = [](dl_phdr_info* info, size_t, void* context) {
    auto& found = *static_cast<std::vector<std::string>*>(context);
    const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    const std::string name = file_name(path);
    if (name.starts_with("libmpi_abi.so")) {
      found.insert(found.begin(), path);
    } else if (name.starts_with("libmpi.so")) {
      found.push_back(path);
    }
    return 0;
  };
  ::dl_iterate_phdr(visit, &paths);
  return paths;
}

pid_t parent_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::stringstream text;
  text << file.rdbuf();
  const std::string stat = text.str();
  const size_t end = stat.rfind(')');  // ends the process name, which may contain any character
  int parent = 0;
  char state = 0;
  if (end == stat.npos || std::sscanf(stat.c_str() + end + 1, " %c %d", &state, &parent) != 2) {
    return 0;
  }
  return parent;
}

/// Library folders of the MPI whose launcher started this process. Its library fits the launcher
/// best. The launcher's proxy on this host is an ancestor of this process.
std::vector<std::string> launcher_folders() {
  std::vector<std::string> folders;
  pid_t pid = ::getppid();
  for (int up = 0; up < 8 && pid > 1; ++up, pid = parent_of(pid)) {
    char target[4096];
    const std::string link = "/proc/" + std::to_string(pid) + "/exe";
    const ssize_t length = ::readlink(link.c_str(), target, sizeof(target));
    if (length <= 0) continue;
    const std::string path(target, static_cast<size_t>(length));
    const std::string name = file_name(path);
    if (!name.starts_with("hydra_") && !name.starts_with("mpiexec") && !name.starts_with("prte")) {
      continue;
    }
    const std::string root = path.substr(0, path.size() - name.size()) + "..";
    folders.push_back(root + "/lib/");
    folders.push_back(root + "/lib64/");
    break;
  }
  return folders;
}

/// Loads the libfabric beside an MPI library. Intel MPI loads its libfabric by name when it starts;
/// its wheel has it in a directory outside the loader's search path. An already loaded library is
/// found by its name.
void load_fabric_beside(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == path.npos) return;
  const std::string folder = path.substr(0, slash);
  const std::string fabric = folder + "/libfabric.so.1";
  if (::access(fabric.c_str(), R_OK) != 0) return;
  if (::access((folder + "/libtcp-fi.so").c_str(), R_OK) == 0) {
    ::setenv("FI_PROVIDER_PATH", folder.c_str(), /*overwrite=*/0);
  }
  ::dlopen(fabric.c_str(), RTLD_NOW | RTLD_LOCAL);
}

}  // namespace

MpiLibrary find_mpi_library(const std::string& folder) {
  MpiLibrary found;
  const auto try_path = [&found](const std::string& path, int flags) {
    found.handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (found.handle == nullptr) {
      const char* why = ::dlerror();
      if (flags == 0) found.problem += (found.problem.empty() ? "" : "; ") + std::string(why);
      return false;
    }
    found.path = path;
    found.abi = abi_of(found.handle);
    load_fabric_beside(path);
    if (!found.abi.empty()) return true;
    found.problem += (found.problem.empty() ? "" : "; ") + path + " is not an MPI library";
    found.handle = nullptr;
    return false;
  };
  if (const auto named = env_text(kMpiVariable)) {
    try_path(*named, 0);
    return found;
  }
  for (const std::string& path : loaded_libraries()) {
    if (try_path(path, RTLD_NOLOAD)) return found;
  }
  std::vector<std::string> folders = launcher_folders();
  if (!folder.empty()) folders.push_back(folder + "/");
  for (const std::string& one : folders) {
    for (const char* name : kStandardNames) {
      const std::string path = one + name;
      if (::access(path.c_str(), R_OK) == 0 && try_path(path, 0)) return found;
    }
  }
  for (const char* name : kStandardNames) {
    if (try_path(name, 0)) return found;
  }
  return found;
}

}  // namespace pycoll
