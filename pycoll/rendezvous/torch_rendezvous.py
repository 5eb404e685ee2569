"""How torch's process groups find each other where mpiexec or srun has started the ranks.

torch itself reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which only torchrun sets. Here the
ranks come from the launcher's own variables, and the store's address from MPI where nothing else
says it. `_pycoll_torch.register` puts this in front of torch's handler of env://.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from pycoll import _core
from pycoll.rendezvous.mpi import Launched, first_that_answers, own_addresses

# pycoll.init derives its port from the job; torch's store has another one that follows from it.
_FIRST_PORT, _NUM_PORTS = 20000, 12000


def meet(
    make_store: Callable[..., Any], timeout: timedelta = timedelta(seconds=300), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """What a rendezvous handler of torch yields: the store, this rank, the number of ranks.

    Args:
        make_store: torch.distributed.TCPStore.
        timeout: Until all ranks must have come.

    Raises:
        MpiError: The ranks are on several hosts, MASTER_ADDR is not set, and there is no MPI.
        UsageError: The launcher's variables make no sense.
        TimeoutError: Some rank did not come.
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
    raise RuntimeError("ranks that mpiexec or srun has started cannot meet again")


def _through_mpi(make_store: Callable[..., Any], timeout: timedelta) -> Any:
    ranks = Launched(timeout.total_seconds())
    own = _core.bootstrap.host_id()
    if ranks.rank != 0:
        host, addresses, port = ranks.exchange(None)[0]
        address = "127.0.0.1" if host == own else first_that_answers(addresses, port)
        return make_store(address, port, ranks.size, False, timeout)
    store = make_store("127.0.0.1", 0, ranks.size, True, timeout, wait_for_workers=False)
    ranks.exchange((own, own_addresses(), store.port))
    return store
