"""Jobs of ranks that mpiexec starts. Each returns its rank and its result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import host_jobs
import numpy as np

import pycoll
from pycoll import _core


def joined(job: Callable[[pycoll.Communicator], Any]) -> Callable[[], tuple[int, Any]]:
    """The job with the communicator that the launcher's variables give."""

    @functools.wraps(job)
    def main() -> tuple[int, Any]:
        with pycoll.init(timeout_s=60) as comm:
            return comm.rank, job(comm)

    return main


@joined
def chosen(comm: pycoll.Communicator) -> Any:
    host_jobs.every_collective(comm)
    return comm.transport, comm.host_rank


@joined
def collectives_and_bytes(comm: pycoll.Communicator) -> Any:
    return host_jobs.every_algorithm(comm), host_jobs.sent_per_message_of(comm, host_jobs.FORMULAS)


@joined
def all_kinds(comm: pycoll.Communicator) -> Any:
    place = host_jobs.every_algorithm(comm)
    sent = host_jobs.sent_per_message_of(comm, host_jobs.TO_HOSTS)
    kinds = host_jobs.split_and_group(comm)
    host_jobs.messages(comm)
    host_jobs.asynchronous_and_coalesced(comm)
    return place, sent, kinds, host_jobs.fork(comm), _core.mpi.facts()


@joined
def smoke(comm: pycoll.Communicator) -> Any:
    """A little of each kind."""
    host_jobs.every_collective(comm)
    kinds = host_jobs.split_and_group(comm)
    host_jobs.messages(comm)
    return comm.transport, kinds, _core.mpi.facts()


def mpi4py_communicator() -> tuple[int, Any]:
    """In MPI's order of ranks and in another one, while MPI's own messages continue."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    turned = world.Split(0, key=-world.rank)
    with pycoll.init(timeout_s=20, mpi=turned) as comm:
        assert (comm.rank, comm.size) == (world.size - 1 - world.rank, world.size)
        for rows in (1, 1000, 100_000):
            host_jobs.one_case(comm, "all_reduce", rows, 0, None)
            assert world.allreduce(rows) == rows * world.size
        odd = world.Split(world.rank % 2, key=world.rank)
        with pycoll.init(timeout_s=20, mpi=odd) as part:
            total = part.all_reduce(np.array([float(world.rank)]))[0]
            kinds = [comm.transport, part.transport]
    return world.rank, [kinds, total]


def threads_of_mpi4py() -> tuple[int, Any]:
    """mpi4py with the level that PYCOLL_TEST_LEVEL names."""
    import os

    import mpi4py

    mpi4py.rc.thread_level = os.environ["PYCOLL_TEST_LEVEL"]
    from mpi4py import MPI

    try:
        with pycoll.init(timeout_s=20, mpi=MPI.COMM_WORLD) as comm:
            host_jobs.every_collective(comm)
            return MPI.COMM_WORLD.rank, [comm.transport, ""]
    except pycoll.Error as error:
        return MPI.COMM_WORLD.rank, [type(error).__name__, str(error)]


def error_of_init() -> tuple[int, Any]:
    try:
        pycoll.init(timeout_s=10).close()
    except pycoll.Error as error:
        return int(_rank()), [type(error).__name__, str(error)]
    return int(_rank()), ["", ""]


def _rank() -> str:
    import os

    return os.environ["PMI_RANK"]
