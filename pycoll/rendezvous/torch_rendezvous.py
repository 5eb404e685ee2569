"""Rendezvous of torch's process groups for ranks that mpiexec or srun has started.

torch itself reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which only torchrun sets. Here the
ranks come from the launcher's own variables, and the store's address from MPI if MASTER_ADDR is not
set. `_pycoll_torch.register` puts this in front of torch's handler of env://.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from pycoll import _core
from pycoll.rendezvous.mpi import Launched, first_that_answers, own_addresses

# pycoll.init derives its port from the job; torch's store has another one that follows from it.
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_TOKEN = "PYCOLL_TOKEN"


def meet(
    make_store: Callable[..., Any], timeout: timedelta = timedelta(seconds=300), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yields the store, this rank and the number of ranks, as a rendezvous handler of torch.

    Args:
        make_store: torch.distributed.TCPStore.
        timeout: Time in which all ranks must join.

    Raises:
        MpiError: The ranks are on several hosts, MASTER_ADDR is not set, and there is no MPI.
        UsageError: The launcher's variables are invalid.
        TimeoutError: A rank did not join before the deadline.
    """
    env = _core.bootstrap.read_launch_env()
    rank, size = env.rank, env.num_ranks
    if size == 1:
        store = make_store("127.0.0.1", 0, 1, True, timeout)
    elif env.has_address:
        port = env.master_port
        if "MASTER_PORT" not in os.environ:
            port = _FIRST_PORT + (port - _FIRST_PORT + _NUM_PORTS // 2) % _NUM_PORTS
        store = make_store(env.master_addr, port, size, rank == 0, timeout)
    else:
        store = _through_mpi(make_store, timeout)
    yield store, rank, size
    raise RuntimeError("ranks that mpiexec or srun has started cannot repeat the rendezvous")


def _through_mpi(make_store: Callable[..., Any], timeout: timedelta) -> Any:
    """Exchanges the address of torch's store over MPI, and a secret, which torch's store lacks."""
    ranks = Launched(timeout.total_seconds())
    own = _core.bootstrap.host_id()
    if ranks.rank != 0:
        host, addresses, port, secret = ranks.exchange(None)[0]
        if secret:
            os.environ[_TOKEN] = secret
        address = "127.0.0.1" if host == own else first_that_answers(addresses, port)
        return make_store(address, port, ranks.size, False, timeout)
    store = make_store("127.0.0.1", 0, ranks.size, True, timeout, wait_for_workers=False)
    secret = "" if os.environ.get(_TOKEN) else secrets.token_hex(16)
    if secret:
        os.environ[_TOKEN] = secret
    ranks.exchange((own, own_addresses(), store.port, secret))
    return store
