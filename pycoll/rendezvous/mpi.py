"""Rendezvous through MPI: over an mpi4py communicator, or over the launcher's MPI."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from pycoll import _core, environment
from pycoll.errors import MpiError, SystemError, UsageError

_TRY_S = 2.0  # timeout of a connection to an address

# The folder of this Python environment, where the wheels of MPICH and Intel MPI put their library.
_core.mpi.set_folder(os.path.join(sys.prefix, "lib"))


def init_over(comm: Any, timeout_s: float) -> Any:
    """Makes a core communicator of an mpi4py communicator's ranks, in their order.

    Args:
        comm: the communicator (mpi4py.MPI.Intracomm).
        timeout_s: timeout of joining and of every later operation, in seconds.

    Raises:
        UsageError: `comm` is not such a communicator, or the ranks' settings differ.
        TimeoutError: not all of its ranks joined.

    Cost: a few small messages.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not isinstance(comm, module.Intracomm):
        raise UsageError(
            f"mpi is a {type(comm).__name__}, expected a communicator of mpi4py "
            "(mpi4py.MPI.Intracomm)"
        )
    if comm == module.COMM_NULL:
        raise UsageError("mpi is MPI.COMM_NULL")
    # Handles are valid only in the library that made them, and ABIs differ.
    shared = _core.mpi.shares_library_with(module.__file__)
    facts = _core.mpi.facts()
    usable = shared and facts["abi"] in facts["abis"].split(", ")
    if all(_gathered(comm, usable)):
        return _core.init_over_mpi(module._handleof(comm), timeout_s)
    if environment.read("PYCOLL_TRANSPORT") == "mpi":
        raise MpiError(
            "PYCOLL_TRANSPORT=mpi, but mpi4py uses a library of MPI that this build of pycoll "
            f"cannot share ({module.Get_library_version().splitlines()[0]}; pycoll: "
            f"{facts['path'] or 'none'} with ABI {facts['abi'] or 'none'}, built for "
            f"{facts['abis'] or 'none'})"
        )
    return _init_through(comm, timeout_s)


def _init_through(comm: Any, timeout_s: float) -> Any:
    """Exchanges rank 0's address over mpi4py, and then connects over TCP."""
    one_host = len(set(_gathered(comm, _core.bootstrap.host_id()))) == 1
    place = (*_choose_place(one_host), secrets.token_hex(16)) if comm.rank == 0 else None
    address, port, token = _gathered(comm, place)[0]
    env = _core.bootstrap.LaunchEnv(
        rank=comm.rank, num_ranks=comm.size, master_addr=address, master_port=port, token=token
    )
    return _core.init_at(env, timeout_s)


def _gathered(comm: Any, own: Any) -> list[Any]:
    """The values of all ranks, by rank, as JSON: mpi4py's methods for objects would unpickle."""
    data = np.frombuffer(json.dumps(own).encode(), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([data.size], np.int64), sizes)
    every = np.empty(sizes.sum(), np.uint8)
    comm.Allgatherv(data, [every, sizes.tolist()])
    return [json.loads(one.tobytes()) for one in np.split(every, np.cumsum(sizes)[:-1])]


def _choose_place(one_host: bool) -> tuple[str, int]:
    addresses = own_addresses()
    address = "127.0.0.1" if one_host else addresses[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]


def own_addresses() -> list[str]:
    """Addresses at which other hosts may reach this one, filtered by PYCOLL_IFNAME."""
    return list(_core.bootstrap.interface_addresses(environment.read("PYCOLL_IFNAME")))


class Launched:
    """All ranks that mpiexec has started, and exchanges between them.

    Args:
        timeout_s: deadline of every exchange, seconds.

    Raises:
        MpiError: no library of MPI was found that this build can use.
    """

    def __init__(self, timeout_s: float) -> None:
        self._comm = _core.mpi.world(timeout_s)
        self._timeout_s = timeout_s
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size

    def exchange(self, own: Any) -> list[Any]:
        """Returns the values of all ranks, by rank, as JSON gives them. Collective."""
        every = self._comm.exchange(json.dumps(own).encode(), self._timeout_s)
        return [json.loads(one) for one in every]


def first_that_answers(addresses: list[str], port: int) -> str:
    """Returns the first address that accepts a connection on that port.

    Raises:
        SystemError: no address accepts a connection.
    """
    problem = ""
    for address in addresses:
        try:
            socket.create_connection((address, port), _TRY_S).close()
            return address
        except OSError as error:
            problem = f"{address}: {error}"
    raise SystemError(
        f"rank 0 answers at none of its addresses ({', '.join(addresses)}), the last {problem}: "
        "PYCOLL_IFNAME chooses interfaces"
    )


def finish() -> None:
    """Finalizes MPI at the end of the process, if pycoll has initialised it."""
    with suppress(Exception):
        # A rank that ends by an error must not wait for the other ranks.
        _core.mpi.finish(getattr(sys, "last_value", None) is None)


__all__ = ["Launched", "finish", "first_that_answers", "init_over", "own_addresses"]
