#include "bootstrap/local/process_info.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "base/error.h"
#include "base/socket.h"

namespace pycoll {
namespace {

// struct pidfd_info, PIDFD_GET_INFO and PIDFD_INFO_EXIT of Linux 6.15's <linux/pidfd.h>, under
// other names because the system's headers may be older than the kernel.
struct PidfdInfo {
  uint64_t mask;
  uint64_t cgroup_id;
  uint32_t pid_and_credentials[11];
  int32_t wait_status;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr uint64_t kPidfdInfoExit = 1 << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

/// The status that waitpid() returned, for a reaped process.
std::optional<int> wait_status_of_reaped(int pidfd) {
  PidfdInfo info = {};
  info.mask = kPidfdInfoExit;
  if (::ioctl(pidfd, kPidfdGetInfo, &info) != 0 || !(info.mask & kPidfdInfoExit)) return {};
  return info.wait_status;
}

/// The pid in this process's pid namespace; -1 once the process was reaped.
pid_t pid_of(int pidfd) {
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(pidfd));
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("Pid:", 0) == 0) return static_cast<pid_t>(std::stol(line.substr(4)));
  }
  return -1;
}

std::string folder_of(pid_t pid) { return "/proc/" + std::to_string(pid); }

/// Fields of the file "stat" of a process or thread.
struct Stat {
  char state = 0;
  uint64_t flags = 0;
  int wait_status = 0;
};
std::optional<Stat> read_stat(const std::string& folder) {
  std::ifstream file(folder + "/stat");
  std::string line;
  std::getline(file, line);
  // The command's name, in parentheses, may hold anything; the 50 fields after it are plain.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  Stat stat;
  std::string field;
  fields >> stat.state;
  for (int i = 0; i < 5; ++i) fields >> field;
  fields >> stat.flags;
  for (int i = 0; i < 42; ++i) fields >> field;
  fields >> stat.wait_status;
  return fields ? std::optional(stat) : std::nullopt;
}

/// The wait status of a process that has ended but was not reaped.
std::optional<int> wait_status_of_zombie(int pidfd) {
  const pid_t pid = pid_of(pidfd);
  if (pid <= 0) return {};
  const std::optional<Stat> stat = read_stat(folder_of(pid));
  // The pid may have been reused before the file was read; this check rules that out.
  if (!stat || stat->state != 'Z' || pid_of(pidfd) != pid) return {};
  return stat->wait_status;
}

/// The wait status of a process all of whose threads have begun to end, so that none runs its code
/// again. A status of 0 may not have been set yet, and gives nothing.
std::optional<int> wait_status_of_ending(int pidfd) {
  constexpr uint64_t kExiting = 4;  // PF_EXITING of the kernel
  const pid_t pid = pid_of(pidfd);
  if (pid <= 0) return {};
  const std::optional<Stat> first = read_stat(folder_of(pid));
  if (!first || (first->flags & kExiting) == 0 || first->wait_status == 0) return {};
  std::error_code error;
  std::filesystem::directory_iterator thread(folder_of(pid) + "/task", error);
  for (; !error && thread != end(thread); thread.increment(error)) {
    const std::optional<Stat> stat = read_stat(thread->path());
    if (stat && (stat->flags & kExiting) == 0) return {};
  }
  if (error || pid_of(pidfd) != pid) return {};
  return first->wait_status;
}

int signal_of(std::optional<int> wait_status) {
  return wait_status && WIFSIGNALED(*wait_status) ? WTERMSIG(*wait_status) : 0;
}

}  // namespace

Fd fd_of_process(pid_t pid, int fd) {
  const Fd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process) return Fd();
  constexpr long kPidfdGetfd = 438;  // SYS_pidfd_getfd, which old headers lack
  return Fd(static_cast<int>(::syscall(kPidfdGetfd, process.get(), fd, 0)));
}

Fd open_own_pidfd() {
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!pidfd) throw_system_error("pidfd_open (pycoll needs Linux 5.3 or later)");
  return pidfd;
}

bool process_ended(int pidfd) {
  pollfd fd = {.fd = pidfd, .events = POLLIN, .revents = 0};
  return ::poll(&fd, 1, 0) > 0 && (fd.revents & POLLIN);
}

bool ends_soon(int pidfd) {
  wait_for_fd(pidfd, POLLIN, Deadline::after_s(0.2));
  return process_ended(pidfd);
}

std::optional<int> end_of(pid_t pid) {
  const Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd && errno == ESRCH) return 0;
  if (!pidfd || !process_ended(pidfd.get())) return std::nullopt;
  return exit_signal(pidfd.get());
}

int exit_signal(int pidfd) {
  std::optional<int> status = wait_status_of_zombie(pidfd);
  if (!status) status = wait_status_of_reaped(pidfd);
  return signal_of(status);
}

std::optional<int> ended_by(int pidfd, Look look) {
  if (process_ended(pidfd)) return exit_signal(pidfd);
  if (look == Look::kQuick) return std::nullopt;
  const std::optional<int> status = wait_status_of_ending(pidfd);
  return status ? std::optional(signal_of(status)) : std::nullopt;
}

int num_usable_cores(std::span<const pid_t> pids) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  for (const pid_t pid : pids) {
    cpu_set_t own;
    CPU_ZERO(&own);
    if (::sched_getaffinity(pid, sizeof(own), &own) == 0) CPU_OR(&usable, &usable, &own);
  }
  return std::max(1, CPU_COUNT(&usable));
}

std::string host_id() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  if (boot_id.empty()) throw SystemError("/proc/sys/kernel/random/boot_id cannot be read");
  struct stat net = {};
  if (::stat("/proc/self/ns/net", &net) != 0) throw_system_error("/proc/self/ns/net");
  return boot_id + "/net:" + std::to_string(net.st_ino);
}

}  // namespace pycoll
