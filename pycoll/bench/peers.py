"""Other libraries that this very environment has; benchmarks/compare.py has all of them."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.bench.case import Problem, numpy_dtype

if TYPE_CHECKING:
    from pycoll.communicator import Communicator


def gloo(comm: Communicator) -> Callable[[Problem], tuple[Any, np.ndarray] | None]:
    """gloo through torch.distributed, among the ranks of `comm`. Collective."""
    import torch
    import torch.distributed as dist

    port = np.zeros(1, np.int64)
    if comm.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port[0] = server.getsockname()[1]
    comm.broadcast(port)
    address = f"tcp://127.0.0.1:{port[0]}"
    dist.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)

    def tensor(values: np.ndarray, dtype: str) -> Any:
        bits = values.astype(numpy_dtype(dtype))
        if dtype == "bf16":
            return torch.from_numpy(bits.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(bits)

    def prepare(problem: Problem) -> tuple[Any, np.ndarray] | None:
        case, n = problem.case, problem.n
        if case.op != "sum":
            return None
        values = problem.brought(problem.rank)
        values[:] = 0  # in place: anything else would grow without end
        x = tensor(values, case.dtype)
        if case.collective in ("all_reduce", "broadcast"):
            extra = (0,) if case.collective == "broadcast" else ()
            return partial(getattr(dist, case.collective), x, *extra), values
        if case.collective == "reduce":
            return partial(dist.reduce, x, 0), values
        parts = {"all_gather": n, "reduce_scatter": 1, "all_to_all": n}.get(case.collective)
        if parts is None:
            return None
        out = tensor(np.zeros(parts * problem.block), case.dtype)
        method: Any = {
            "all_gather": dist.all_gather_into_tensor,
            "reduce_scatter": dist.reduce_scatter_tensor,
            "all_to_all": dist.all_to_all_single,
        }[case.collective]
        return partial(method, out, x.reshape(-1)), values

    return prepare


PEERS = {"gloo": gloo}


def installed() -> list[str]:
    """The peers that can be measured here."""
    return ["gloo"] if importlib.util.find_spec("torch") is not None else []
