"""How a process reads from its environment which rank it is."""

from __future__ import annotations

import os
import socket

import pytest

from pycoll import errors
from pycoll._core import bootstrap

pytestmark = pytest.mark.pure

PREFIXES = ("RANK", "WORLD_", "MASTER_", "PYCOLL_", "TORCHELASTIC_")
PREFIXES += ("OMPI_", "PMI", "SLURM_", "MPI_LOCAL")
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4838@1",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def read(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> bootstrap.LaunchEnv:
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return bootstrap.read_launch_env()


def test_no_variables_mean_one_rank(monkeypatch):
    env = read(monkeypatch, {})
    assert (env.rank, env.num_ranks, env.master_addr, env.master_port) == (0, 1, "127.0.0.1", 0)
    assert env.token == f"uid {os.geteuid()} "


def test_torchrun_style_variables_are_read(monkeypatch):
    env = read(monkeypatch, {**TORCHRUN, "PYCOLL_TOKEN": "secret"})
    assert (env.rank, env.num_ranks) == (2, 4)
    assert (env.master_addr, env.master_port, env.token) == ("10.0.0.1", 29500, "secret")
    for port, expected in [("29500", 29501), ("65535", 65534)]:  # not that of torchrun's agent
        agent = {**TORCHRUN, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert read(monkeypatch, agent).master_port == expected
        agent["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        assert read(monkeypatch, agent).master_port == int(port)


def test_mpiexec_and_srun_variables_are_read(monkeypatch):
    for variables, rank, num_ranks in [
        (OPEN_MPI, 1, 2),
        (SRUN, 3, 5),
        ({**SRUN, **OPEN_MPI}, 1, 2),
        ({**OPEN_MPI, **TORCHRUN}, 2, 4),
        ({"PMI_RANK": "6", "PMI_SIZE": "7", "MASTER_PORT": "29500"}, 6, 7),
    ]:
        env = read(monkeypatch, variables)
        assert (env.rank, env.num_ranks) == (rank, num_ranks), variables
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert read(monkeypatch, batch).num_ranks == 1


def test_port_and_token_follow_from_the_job(monkeypatch):
    for variables, other_job in [
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-host-4839@1"}),
        (SRUN, {"SLURM_JOB_ID": "78"}),
        (SRUN, {"SLURM_STEP_ID": "1"}),
    ]:
        rank_name = next(name for name in variables if name.endswith(("_RANK", "_PROCID")))
        one = read(monkeypatch, variables)
        peer = read(monkeypatch, {**variables, rank_name: "0"})
        other = read(monkeypatch, {**variables, **other_job})
        assert one.master_addr == "127.0.0.1"
        assert 20000 <= one.master_port < 32000
        assert (peer.master_port, peer.token) == (one.master_port, one.token)
        assert (other.master_port, other.token) != (one.master_port, one.token)


def test_mpich_ranks_find_their_job_through_the_pmi_socket(monkeypatch):
    ends = socket.socketpair()
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": str(ends[0].fileno())}
    env = read(monkeypatch, variables)
    assert env.token == f"uid {os.geteuid()} pmi {os.getpid()}"
    assert 20000 <= env.master_port < 32000
    for end in ends:
        end.close()


def test_srun_over_several_hosts_meets_at_the_first(monkeypatch):
    for hosts, first in {
        "node[01-03,07],login": "node01",
        "node[3,5-7]": "node3",
        "rack[2-3]-n": "rack2-n",
        "10.77.0.1,10.77.0.2": "10.77.0.1",
        "alone": "alone",
    }.items():
        several = {**SRUN, "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": hosts}
        env = read(monkeypatch, several)
        assert (env.master_addr, env.has_address) == (first, True)
        assert env.master_port == read(monkeypatch, {**several, "SLURM_PROCID": "0"}).master_port
        one = {**several, "SLURM_STEP_NUM_NODES": "1"}
        assert read(monkeypatch, one).master_addr == "127.0.0.1"
        elsewhere = {**several, "MASTER_ADDR": "10.0.0.9"}
        assert read(monkeypatch, elsewhere).master_addr == "10.0.0.9"


def test_mpiexec_over_several_hosts_leaves_the_address_to_mpi(monkeypatch):
    variables = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    env = read(monkeypatch, variables)
    assert (env.rank, env.has_address, env.by_mpiexec) == (2, False, True)
    here = {**variables, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}
    env = read(monkeypatch, here)
    assert (env.has_address, env.master_addr) == (True, "10.0.0.9")
    one_host = {**variables, "MPI_LOCALNRANKS": "4", "MASTER_PORT": "29500"}
    assert read(monkeypatch, one_host).has_address
    openmpi = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert not read(monkeypatch, openmpi).has_address


def test_wrong_variable_is_named(monkeypatch):
    for name, value, text in [
        ("RANK", "x", "RANK=x is not a number"),
        ("RANK", "", "RANK= is not a number"),
        ("RANK", "1.5", "RANK=1.5 is not a number"),
        ("RANK", "-1", "RANK=-1 is not between 0 and"),
        ("RANK", "4", "RANK=4 is not below WORLD_SIZE=4"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is not between 1 and"),
        ("WORLD_SIZE", "99999999999", "WORLD_SIZE=99999999999 is not between"),
        ("MASTER_PORT", "http", "MASTER_PORT=http is not a number"),
        ("MASTER_PORT", "65536", "MASTER_PORT=65536 is not between 1 and 65535"),
        ("RANK", None, "RANK is not set, but WORLD_SIZE is"),
        ("WORLD_SIZE", None, "WORLD_SIZE is not set, but RANK is"),
        ("MASTER_PORT", None, "MASTER_PORT is not set, .* set MASTER_ADDR and MASTER_PORT"),
    ]:
        variables = {k: v for k, v in {**TORCHRUN, name: value}.items() if v is not None}
        with pytest.raises(errors.UsageError, match=text):
            read(monkeypatch, variables)
