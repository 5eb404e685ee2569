// Who this process is among the ranks, as its launcher says in the environment.
#pragma once

#include <string>

namespace pycoll {

struct LaunchEnv {
  int rank = 0;
  int num_ranks = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: for one rank, which needs no known port, and where MPI is to be asked
  std::string token;
  bool has_address = true;  // of rank 0, that other hosts reach; or all ranks are on one host
  bool by_mpiexec = false;  // MPI can bring the ranks together
};

/// Reads the launcher's variables; the first launcher with a variable set counts:
///
/// | Launcher                  | rank                 | world size           |
/// |---------------------------|----------------------|----------------------|
/// | torchrun, `pycoll run`    | RANK                 | WORLD_SIZE           |
/// | Open MPI                  | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE |
/// | MPICH, Intel MPI          | PMI_RANK             | PMI_SIZE             |
/// | srun                      | SLURM_PROCID         | SLURM_NTASKS         |
/// | none of them              | 0                    | 1                    |
///
/// (SLURM_* count only with SLURM_STEP_ID: a batch script has the others too, but is one process.)
///
/// Address: MASTER_ADDR; without it, of a job that srun has spread over several hosts the first one
/// of SLURM_STEP_NODELIST, of one that mpiexec has (MPI_LOCALNRANKS, OMPI_COMM_WORLD_LOCAL_SIZE)
/// none: MPI knows it. Else 127.0.0.1. Port: MASTER_PORT; plus one when
/// TORCHELASTIC_USE_AGENT_STORE=True, because torchrun's agent listens on MASTER_PORT itself;
/// without MASTER_PORT one of 20000 to 31999 that follows from the user and the job's identity:
/// PMIX_NAMESPACE, OMPI_MCA_ess_base_jobid, the process behind PMI_FD, or SLURM_JOB_ID and
/// SLURM_STEP_ID. (PMI_ID is no such identity: it differs between the ranks of a job.)
///
/// Token: PYCOLL_TOKEN, else the user's id and the job's identity. That default keeps apart jobs
/// that meet by accident; it is no secret, so set PYCOLL_TOKEN where others can reach the port.
/// With PYCOLL_TLS=1 several ranks need one.
///
/// Raises UsageError, naming the variable, where one is missing or makes no sense.
LaunchEnv read_launch_env();

/// Whether MPI would know of this process: its launcher has left its variables.
bool was_started_by_mpiexec();

}  // namespace pycoll
