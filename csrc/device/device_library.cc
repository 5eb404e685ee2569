#include "device/device_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "base/environment.h"
#include "base/error.h"

namespace pycoll {
namespace {

/// Path of the device library in the folder of the core's own library.
std::string default_path() {
  Dl_info found{};
  if (::dladdr(reinterpret_cast<const void*>(&default_path), &found) == 0 ||
      found.dli_fname == nullptr) {
    return "_cuda.so";
  }
  const std::string core(found.dli_fname);
  const size_t slash = core.rfind('/');
  return (slash == core.npos ? "" : core.substr(0, slash + 1)) + "_cuda.so";
}

struct Opened {
  const DeviceTable* table = nullptr;
  std::string note;  // the library's path, or why there is no table
};

Opened open_library() {
  const auto named = env_text(kDeviceLibraryVariable);
  const std::string path = named.value_or(default_path());
  if (!named && ::access(path.c_str(), R_OK) != 0) {
    return {nullptr, "this build of pycoll has no CUDA part (" + path +
                         " is missing): with nvcc on PATH, build again with PYCOLL_CUDA=on"};
  }
  // Never closed: its threads may run until the process ends.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {nullptr, "cannot open " + path + ": " + ::dlerror()};
  using GetTable = const DeviceTable* (*)();
  const auto get_table = reinterpret_cast<GetTable>(::dlsym(library, "pycoll_device_table"));
  if (get_table == nullptr) return {nullptr, path + " is not a device library of pycoll"};
  const DeviceTable* table = get_table();
  if (table->version != kDeviceTableVersion || table->table_bytes != sizeof(DeviceTable)) {
    return {nullptr, path + " belongs to another version of pycoll: rebuild both"};
  }
  return {table, path};
}

/// The library that was opened last. Tests name several, one after another.
Opened opened() {
  static std::mutex mutex;
  static std::map<std::string, Opened> found;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = found.try_emplace(env_text(kDeviceLibraryVariable).value_or(""));
  if (is_new) at->second = open_library();
  return at->second;
}

}  // namespace

const DeviceTable* find_device_table(std::string& note) {
  const Opened found = opened();
  note = found.note;
  return found.table;
}

const DeviceTable& device_table() {
  const Opened found = opened();
  if (found.table != nullptr) return *found.table;
  throw UsageError("device arrays need pycoll's device library: " + found.note);
}

}  // namespace pycoll
