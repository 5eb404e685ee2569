#include "perf/ranks.h"

#include <netinet/in.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "join/init.h"

namespace pycoll::perf {
namespace {

/// Ranks are dealt to the cores in turn, unless there are more ranks than cores.
void pin(const Options& options, int rank) {
  cpu_set_t allowed;
  if (!options.pinned || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  if (options.num_ranks > CPU_COUNT(&allowed)) return;
  for (int core = 0, place = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || place++ != rank) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof(one), &one);
  }
}

bool guarded(const std::function<bool()>& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return false;
  }
}

int run_threads(const Options& options, const std::function<bool(Communicator&)>& rank_main) {
  const auto world = make_world(options.num_ranks);
  std::atomic<bool> good = true;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      pin(options, rank);
      const bool ok = guarded([&] {
        Communicator comm(make_local_transport(world, rank), options.timeout_s);
        return rank_main(comm);
      });
      if (!ok) good = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return good ? 0 : 1;
}

int run_this_rank(const Options& options, const std::function<bool(Communicator&)>& rank_main) {
  return guarded([&] { return rank_main(*init_from_environment(options.timeout_s).comm); }) ? 0 : 1;
}

/// A free TCP port of this host.
int free_port() {
  const Fd socket_fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (::bind(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw SystemError("no free TCP port on this host");
  }
  return ntohs(address.sin_port);
}

void set_environment(int rank, int num_ranks, int port, const std::string& token) {
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(num_ranks).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  setenv("PYCOLL_TOKEN", token.c_str(), 1);
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
}

int run_processes(const Options& options, const std::function<bool(Communicator&)>& rank_main) {
  const int port = free_port();
  uint64_t random = 0;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
    throw SystemError("no random bytes from the system");
  }
  std::fflush(nullptr);
  const pid_t parent = getpid();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) throw SystemError("cannot start a process for a rank");
    if (pid == 0) {
      // A rank ends when this program ends in any way.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      pin(options, rank);
      set_environment(rank, options.num_ranks, port, std::to_string(random));
      const int status = run_this_rank(options, rank_main);
      std::fflush(nullptr);
      _exit(status);
    }
    pids.push_back(pid);
  }
  int result = 0;
  for (size_t rank = 0; rank < pids.size(); ++rank) {
    int status = 0;
    waitpid(pids[rank], &status, 0);
    if (WIFSIGNALED(status)) {
      std::fprintf(stderr, "rank %zu was ended by signal %d\n", rank, WTERMSIG(status));
    }
    if (status != 0) result = 1;
  }
  return result;
}

}  // namespace

int run_ranks(const Options& options, const std::function<bool(Communicator&)>& rank_main) {
  switch (options.ranks_are) {
    case RanksAre::kThreads:
      return run_threads(options, rank_main);
    case RanksAre::kProcesses:
      return run_processes(options, rank_main);
    case RanksAre::kLaunched:
      return run_this_rank(options, rank_main);
  }
  return 1;
}

}  // namespace pycoll::perf
