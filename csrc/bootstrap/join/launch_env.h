// The rank of this process and its world, from the environment variables of its launcher.
#pragma once

#include <string>

#include "bootstrap/security/token.h"

namespace pycoll {

struct LaunchEnv {
  int rank = 0;
  int num_ranks = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: a world of one rank, or MPI knows the address
  Token token;
  bool has_address = true;  // rank 0's address is known, or all ranks share one host
  bool by_mpiexec = false;  // MPI can connect the ranks
};

/// Reads the launcher's variables. The first launcher in this table with a variable set counts:
///
/// | Launcher                  | rank                 | world size           |
/// |---------------------------|----------------------|----------------------|
/// | torchrun, `pycoll run`    | RANK                 | WORLD_SIZE           |
/// | Open MPI                  | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE |
/// | MPICH, Intel MPI          | PMI_RANK             | PMI_SIZE             |
/// | srun                      | SLURM_PROCID         | SLURM_NTASKS         |
/// | none of them              | 0                    | 1                    |
///
/// (SLURM_* count only with SLURM_STEP_ID: a batch script has them too, but is one process.)
///
/// Address: MASTER_ADDR. Without it, a job on several hosts uses the first host of
/// SLURM_STEP_NODELIST if srun started it, and no address if mpiexec did (MPI_LOCALNRANKS,
/// OMPI_COMM_WORLD_LOCAL_SIZE): MPI knows it. All other jobs use 127.0.0.1.
///
/// Port: MASTER_PORT; plus one with TORCHELASTIC_USE_AGENT_STORE=True, because torchrun's agent
/// listens on MASTER_PORT itself. Without MASTER_PORT, a port from 20000 to 31999 is derived from
/// the user and the job's identity: PMIX_NAMESPACE, OMPI_MCA_ess_base_jobid, the process behind
/// PMI_FD, or SLURM_JOB_ID and SLURM_STEP_ID. (PMI_ID differs between the ranks of a job.)
///
/// Token: PYCOLL_TOKEN; else the random number that srun gives each step on Cray systems,
/// PMI_SHARED_SECRET; else the user's id and the job's identity. The last one only separates jobs
/// that use the same port by accident: without a secret, all ranks are on one host and belong to
/// one user (Trust::kSameUser). They then use 127.0.0.1 if the launcher's variables say that all of
/// them are here. With PYCOLL_TLS=1, a world of several ranks must set PYCOLL_TOKEN.
///
/// Raises UsageError, naming the variable, for a missing or invalid value.
LaunchEnv read_launch_env();

/// Whether an MPI launcher started this process: its environment variables are set.
bool was_started_by_mpiexec();

}  // namespace pycoll
