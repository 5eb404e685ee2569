#include "comm/machine.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "base/fd.h"

namespace pycoll {
namespace {

std::string cpu_model() {
  // Reads the first processor only: the kernel generates the file in pieces, and it is long on a
  // large machine.
  std::string text;
  read_file("/proc/cpuinfo", 4096, text);
  for (const std::string_view key : {"model name", "CPU part", "cpu model"}) {
    const size_t at = text.find(key);
    if (at == std::string::npos) continue;
    const size_t first = text.find_first_not_of(": \t", at + key.size());
    const size_t last = text.find('\n', at);
    if (first < last) return text.substr(first, last - first);
  }
  return "unknown CPU";
}

std::string folder_from(const char* variable, const char* below) {
  const char* value = std::getenv(variable);
  return value == nullptr || *value == 0 ? std::string() : value + std::string(below);
}

}  // namespace

int read_file(const std::string& path, size_t max_bytes, std::string& text) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) return errno;
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) return errno;
  // Reading a pipe or a device could block or never end.
  if (!S_ISREG(status.st_mode)) return S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  text.clear();
  char buffer[16384];
  while (text.size() < max_bytes) {
    const ssize_t got =
        ::read(file.get(), buffer, std::min(sizeof(buffer), max_bytes - text.size()));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) break;
    text.append(buffer, static_cast<size_t>(got));
  }
  return 0;
}

std::string machine_fingerprint() {
  utsname name = {};
  ::uname(&name);
  std::string text = cpu_model() + "; " + std::to_string(::sysconf(_SC_NPROCESSORS_ONLN)) +
                     " cores; " + name.machine;
  // Keeps the text printable and on one line, whatever the kernel reports.
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

std::string tuning_table_path() {
  std::string folder = folder_from("PYCOLL_CACHE_DIR", "");
  if (folder.empty()) folder = folder_from("XDG_CACHE_HOME", "/pycoll");
  if (folder.empty()) folder = folder_from("HOME", "/.cache/pycoll");
  if (folder.empty()) return {};
  uint32_t hash = 2166136261u;
  for (const char c : machine_fingerprint()) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  }
  char file[32];
  std::snprintf(file, sizeof(file), "/tuning-%08x.txt", hash);
  return folder + file;
}

}  // namespace pycoll
