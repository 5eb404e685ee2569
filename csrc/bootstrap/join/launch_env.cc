#include "bootstrap/join/launch_env.h"

#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

#include "base/environment.h"
#include "base/error.h"
#include "base/printable.h"
#include "bootstrap/security/tls_setting.h"

namespace pycoll {
namespace {

struct Launcher {
  const char* rank;
  const char* num_ranks;
  const char* only_with;  // counts only if this is set too; may be null
  const char* num_local;  // number of ranks on this host; may be null
};

constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE", nullptr, nullptr},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", nullptr, "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", nullptr, "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", nullptr},
};

constexpr int kFirstDerivedPort = 20000;  // below Linux's range for outgoing connections
constexpr int kNumDerivedPorts = 12000;
constexpr int kMaxPort = 65535;

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

int parse_number(const char* name, const std::string& text, int min, int max) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped_at, error] = std::from_chars(text.data(), end, value);
  const std::string given = std::string(name) + "=" + printable(text, kShownBytes);
  if (error == std::errc::invalid_argument || stopped_at != end) {
    throw UsageError(given + " is not a number");
  }
  if (error != std::errc() || value < min || value > max) {
    throw UsageError(given + " is not between " + std::to_string(min) + " and " +
                     std::to_string(max));
  }
  return value;
}

int required_number(const char* name, const char* because, int min, int max) {
  const auto text = variable(name);
  if (!text) throw UsageError(std::string(name) + " is not set, but " + because + " is");
  return parse_number(name, *text, min, max);
}

/// Reads rank and size from the first launcher whose variables are set. Returns the launcher.
const Launcher* read_ranks(LaunchEnv& env) {
  for (const Launcher& launcher : kLaunchers) {
    if (!variable(launcher.rank) && !variable(launcher.num_ranks)) continue;
    if (launcher.only_with != nullptr && !variable(launcher.only_with)) continue;
    env.num_ranks = required_number(launcher.num_ranks, launcher.rank, 1, INT32_MAX);
    env.rank = required_number(launcher.rank, launcher.num_ranks, 0, INT32_MAX);
    if (env.rank >= env.num_ranks) {
      throw UsageError(std::string(launcher.rank) + "=" + std::to_string(env.rank) +
                       " is not below " + launcher.num_ranks + "=" + std::to_string(env.num_ranks));
    }
    return &launcher;
  }
  return nullptr;
}

/// Whether the launcher's variables say that there are ranks on other hosts.
bool has_other_hosts(const LaunchEnv& env, const Launcher& launcher) {
  if (launcher.num_local != nullptr) {
    if (const auto here = variable(launcher.num_local)) {
      return parse_number(launcher.num_local, *here, 1, INT32_MAX) < env.num_ranks;
    }
  }
  // A variable of srun, which may start MPI's ranks too.
  const auto num_hosts = variable("SLURM_STEP_NUM_NODES");
  return launcher.rank != std::string("RANK") && num_hosts &&
         parse_number("SLURM_STEP_NUM_NODES", *num_hosts, 1, INT32_MAX) > 1;
}

/// Whether the launcher's variables say that all ranks are on this host.
bool has_all_ranks_here(const LaunchEnv& env, const Launcher& launcher) {
  const bool by_torchrun = launcher.rank == std::string("RANK");
  const char* num_local = by_torchrun ? "LOCAL_WORLD_SIZE" : launcher.num_local;
  if (num_local != nullptr) {
    if (const auto here = variable(num_local)) {
      return parse_number(num_local, *here, 1, INT32_MAX) == env.num_ranks;
    }
  }
  return !by_torchrun && variable("SLURM_STEP_NUM_NODES") == "1";
}

/// The first host of a list, where SLURM starts rank 0: "node01" of "node[01-03,07],login".
std::string first_host(const std::string& list) {
  const size_t end = list.find_first_of("[,");
  if (end == list.npos || list[end] == ',') return list.substr(0, end);
  const size_t first_end = list.find_first_of(",-]", end);
  const size_t close = list.find(']', end);
  if (close == list.npos) return "";
  return list.substr(0, end) + list.substr(end + 1, first_end - end - 1) +
         list.substr(close + 1, list.find(',', close) - close - 1);
}

/// Names the process that created the socket through which mpiexec of MPICH or Intel MPI talks to a
/// rank: mpiexec's proxy, common to all ranks of the job on this host, even behind shells.
std::optional<std::string> pmi_proxy() {
  const auto text = variable("PMI_FD");
  if (!text) return std::nullopt;
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  const int fd = parse_number("PMI_FD", *text, 0, INT32_MAX);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return std::nullopt;
  return "pmi " + std::to_string(credentials.pid);
}

/// An identity that is unique to the job and common to its ranks; empty if the launcher sets none.
std::string job_identity() {
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (const auto value = variable(name)) return *value;
  }
  if (const auto proxy = pmi_proxy()) return *proxy;
  const auto job = variable("SLURM_JOB_ID");
  const auto step = variable("SLURM_STEP_ID");
  return job && step ? "slurm " + *job + "." + *step : "";
}

/// FNV-1a: identical on every rank, which std::hash does not guarantee.
uint64_t hash(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325;
  for (const char byte : text) {
    value = (value ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  }
  return value;
}

/// The session's token. Slurm's plugin mpi/cray_shasta gives all ranks of a step a random number.
Token session_token(const LaunchEnv& env, const Launcher* launcher,
                    const std::string& user_and_job) {
  if (env.num_ranks == 1) return {env_text("PYCOLL_TOKEN").value_or(user_and_job), Trust::kSecret};
  Token token = read_token(user_and_job);
  const auto of_srun = variable("PMI_SHARED_SECRET");
  const bool by_srun = launcher != nullptr && launcher->rank == std::string("SLURM_PROCID");
  if (token.trust == Trust::kSameUser && by_srun && of_srun && !of_srun->empty()) {
    token = {seal_token(*of_srun, user_and_job), Trust::kSecret};
  }
  return token;
}

int read_port(const LaunchEnv& env, const std::string& job, const std::string& user_and_job) {
  if (const auto text = variable("MASTER_PORT")) {
    const int port = parse_number("MASTER_PORT", *text, 1, kMaxPort);
    if (variable("TORCHELASTIC_USE_AGENT_STORE") != "True") return port;
    return port < kMaxPort ? port + 1 : port - 1;
  }
  if (env.num_ranks == 1 || !env.has_address) return 0;
  if (job.empty()) {
    throw UsageError("MASTER_PORT is not set, and no variable distinguishes this job of " +
                     std::to_string(env.num_ranks) +
                     " ranks from other jobs: set MASTER_ADDR and MASTER_PORT on every rank");
  }
  return kFirstDerivedPort + static_cast<int>(hash(user_and_job) % kNumDerivedPorts);
}

}  // namespace

bool was_started_by_mpiexec() {
  for (const char* name : {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"}) {
    if (variable(name)) return true;
  }
  return false;
}

LaunchEnv read_launch_env() {
  LaunchEnv env;
  const Launcher* launcher = read_ranks(env);
  const std::string job = job_identity();
  const std::string user_and_job = "uid " + std::to_string(::geteuid()) + " " + job;
  if (const auto address = variable("MASTER_ADDR"); address && !address->empty()) {
    env.master_addr = *address;
  } else if (launcher != nullptr && has_other_hosts(env, *launcher)) {
    const auto hosts = variable("SLURM_STEP_NODELIST");
    const std::string first = hosts ? first_host(*hosts) : "";
    env.has_address = !first.empty();
    if (env.has_address) env.master_addr = first;
  }
  env.by_mpiexec = was_started_by_mpiexec();
  env.master_port = read_port(env, job, user_and_job);
  env.token = session_token(env, launcher, user_and_job);
  if (env.token.trust == Trust::kSameUser && launcher != nullptr &&
      has_all_ranks_here(env, *launcher)) {
    env.master_addr = "127.0.0.1";
  }
  return env;
}

}  // namespace pycoll
