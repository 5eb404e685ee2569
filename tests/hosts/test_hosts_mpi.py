"""Ranks that mpiexec starts on several hosts: links over MPI, and ranks that meet through it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import mpi_kit
import pytest
from host_jobs import FORMULAS, TO_HOSTS, Hosts

pytestmark = [pytest.mark.ranks, pytest.mark.mpi, pytest.mark.timeout(150)]

MPIS = ["mpich", *(pytest.param(name, marks=pytest.mark.slow) for name in ("impi", "openmpi"))]
OVER_MPI = {"PYCOLL_TRANSPORT": "mpi"}
PLACES = [["mpi", 0], ["mpi", 1]] * 2  # transport and host_rank of 2 x 2 ranks


def need_mpi4py() -> None:
    # Asked of the finder: to import it here would start MPI in pytest's process.
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")


@pytest.mark.parametrize("name", MPIS)
def test_every_collective_algorithm_protocol_and_size_equals_numpy_over_mpi(two, name):
    results = mpi_kit.run(mpi_kit.need(name), two, 2, "collectives", **OVER_MPI)
    assert [result[:2] for result in results] == PLACES


@pytest.mark.parametrize("name", MPIS)
@pytest.mark.parametrize("job", ["splits", "messages", "asynchronous", "fork"])
def test_what_runs_over_tcp_runs_over_mpi(two, name, job):
    results = mpi_kit.run(mpi_kit.need(name), two, 2, job, **OVER_MPI)
    assert [result[:2] for result in results] == PLACES
    if job == "splits":
        assert [result[2] for result in results] == [["shm", "mpi", "mpi"]] * 4
    if job == "fork":
        assert [result[2] for result in results] == [0] * 4


@pytest.mark.parametrize("name", MPIS)
def test_bytes_between_hosts_over_mpi_are_those_of_the_formula(two, name):
    results = mpi_kit.run(mpi_kit.need(name), two, 2, "bytes_sent", **OVER_MPI)
    for collective, algorithm in TO_HOSTS:
        expected = FORMULAS[collective, algorithm](Hosts(0, 2, 2))
        found = results[0][2][f"{collective}/{algorithm}"]
        assert found == pytest.approx(expected, rel=0.03), (collective, algorithm)


def test_ranks_of_mpiexec_meet_through_mpi_and_link_by_what_is_asked_for(two):
    mpi = mpi_kit.need("mpich")
    for wanted in ("mpi", "tcp"):
        results = mpi_kit.run(mpi, two, 2, "chosen", PYCOLL_TRANSPORT=wanted)
        assert [result[:2] for result in results] == [[wanted, 0], [wanted, 1]] * 2


def test_library_is_that_of_the_launcher(two):
    for name in ("mpich", "impi"):
        if name in mpi_kit.installed():
            mpi = mpi_kit.need(name)
            for facts in mpi_kit.run(mpi, two, 1, "library", **OVER_MPI):
                assert facts["abi"] == "abi"
                assert ("Intel" in facts["version"]) == (name == "impi"), facts


@pytest.mark.parametrize("name", MPIS)
def test_communicator_of_mpi4py_gives_ranks_their_order(two, name):
    need_mpi4py()
    for env in (OVER_MPI, {}):
        results = mpi_kit.run(mpi_kit.need(name), two, 2, "mpi4py_communicator", **env)
        assert [result[1] for result in results] == [2.0, 4.0, 2.0, 4.0]
        kinds = {transport for result in results for transport in result[0]}
        assert kinds == ({"mpi"} if env else {"tcp"})


@pytest.mark.parametrize(
    ("level", "outcome"), [("multiple", ""), ("serialized", ""), ("funneled", "MPI_THREAD")]
)
def test_thread_level_of_mpi4py_is_enough_or_refused_in_words(two, level, outcome):
    need_mpi4py()
    env = {"PYCOLL_TEST_LEVEL": level, **OVER_MPI}
    for kind, text in mpi_kit.run(mpi_kit.need("mpich"), two, 1, "threads_of_mpi4py", **env):
        if outcome:
            assert kind == "UsageError" and outcome in text and "mpi4py.rc.thread_level" in text
        else:
            assert kind == "mpi", text


def test_missing_library_is_named_with_what_to_do(two):
    mpi = mpi_kit.need("mpich")
    results = mpi_kit.run(mpi, two, 1, "error_of_init", PYCOLL_MPI="/nowhere/libmpi_abi.so.1")
    for kind, text in results:
        assert kind == "MpiError"
        assert "/nowhere/libmpi_abi.so.1" in text and "MASTER_ADDR" in text and "PYCOLL_MPI" in text


def test_transport_that_is_not_there_is_the_same_error_on_all_ranks(two):
    mpi = mpi_kit.need("mpich")
    for kind, text in mpi_kit.run(mpi, two, 1, "error_of_init", PYCOLL_TRANSPORT="smoke"):
        assert kind == "UsageError" and "PYCOLL_TRANSPORT=smoke, expected tcp or mpi" in text


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", MPIS)
@pytest.mark.parametrize("where", ["one host", "two hosts", "two hosts over MPI"])
def test_mpiexec_trains_as_one_process_does(two, name, where):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    words = [sys.executable, str(mpi_kit.ROOT / "examples" / "ddp_digits.py")]
    mpi = mpi_kit.need(name)
    if where == "one host":
        environment = os.environ | mpi.environment | {"PYTHONPATH": str(mpi_kit.ROOT)}
        done = subprocess.run(
            mpi.here(4, words), env=environment, capture_output=True, text=True, timeout=140
        )
        job = mpi_kit.Job(done.returncode, done.stdout + done.stderr)
    else:
        job = mpi_kit.mpiexec(mpi, two, 2, words, 140, **(OVER_MPI if "MPI" in where else {}))
    assert job.status == 0, job.text
    assert "4 ranks" in job.text, job.text
    assert "off one process (allowed 1e-03): ok" in job.text, job.text
