"""Ranks that mpiexec starts on several hosts: links over MPI, and meeting through MPI."""

from __future__ import annotations

import importlib.util
import sys

import mpi_kit
import pytest
from host_jobs import differences_from_formulas

pytestmark = [pytest.mark.ranks, pytest.mark.mpi, pytest.mark.timeout(300)]

OVER_MPI = {"PYCOLL_TRANSPORT": "mpi"}


def need_mpi4py() -> None:
    # The finder answers: an import would start MPI in pytest's process.
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")


def test_every_kind_of_operation_runs_over_mpich(two):
    results = mpi_kit.run(mpi_kit.need("mpich"), two, 2, "all_kinds", **OVER_MPI)
    places, sent, kinds, statuses, facts = zip(*results, strict=True)
    assert list(places) == [["mpi", 0], ["mpi", 1]] * 2
    assert not differences_from_formulas(list(sent[::2]), 2)
    assert list(kinds) == [["shm", "mpi", "mpi"]] * 4
    assert list(statuses) == [0] * 4  # of forked children
    for library in facts:
        assert library["abi"] == "abi" and "Intel" not in library["version"], library


@pytest.mark.slow
@pytest.mark.parametrize("name", ["impi", "openmpi"])
def test_other_mpis_carry_collectives_groups_and_messages(two, name):
    for transport, kinds, library in mpi_kit.run(mpi_kit.need(name), two, 2, "smoke", **OVER_MPI):
        assert transport == "mpi" and kinds == ["shm", "mpi", "mpi"]
        assert ("Intel" in library["version"]) == (name == "impi"), library


def test_ranks_of_mpiexec_meet_through_mpi_and_may_link_over_tcp(two):
    results = mpi_kit.run(mpi_kit.need("mpich"), two, 2, "chosen", PYCOLL_TRANSPORT="tcp")
    assert results == [["tcp", 0], ["tcp", 1]] * 2


@pytest.mark.parametrize("links", ["mpi", pytest.param("tcp", marks=pytest.mark.slow)])
def test_communicator_of_mpi4py_gives_ranks_their_order(two, links):
    need_mpi4py()
    env = OVER_MPI if links == "mpi" else {}
    results = mpi_kit.run(mpi_kit.need("mpich"), two, 2, "mpi4py_communicator", **env)
    assert [result[1] for result in results] == [2.0, 4.0, 2.0, 4.0]
    assert {transport for result in results for transport in result[0]} == {links}


@pytest.mark.parametrize(("level", "outcome"), [("serialized", ""), ("funneled", "MPI_THREAD")])
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
        assert kind == "UsageError" and "PYCOLL_TRANSPORT=smoke: expected one of tcp mpi" in text


@pytest.mark.torch
@pytest.mark.slow
def test_mpiexec_trains_as_one_process_does(two):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    words = [sys.executable, str(mpi_kit.ROOT / "examples" / "ddp_digits.py")]
    job = mpi_kit.mpiexec(mpi_kit.need("mpich"), two, 2, words, 250, **OVER_MPI)
    assert job.status == 0, job.text
    assert "4 ranks" in job.text, job.text
    assert "off one process (allowed 1e-03): ok" in job.text, job.text
