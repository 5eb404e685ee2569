"""all_reduce on devices, timed: ranks as threads of one process, or as processes.

The caller must not have used a device yet: ranks are forked.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from device_peers import SAMPLES, num_calls_for
from device_traffic import traffic

import pycoll
from pycoll import _core
from pycoll.arrays.device import DeviceArray
from pycoll.arrays.memory import numpy_dtype

TIMEOUT_S = 60.0
MIN_ROOFLINE_BYTES = 1 << 20  # shorter messages are the launch's matter


@dataclass(frozen=True, slots=True)
class Figures:
    """Times of one message in us, by the slowest rank; medians over samples."""

    nbytes: int
    algorithm: str
    queued_us: float  # of one call in a row of them
    launch_us: float  # in which the call returned, of the same row
    end_to_end_us: float  # of a call and the wait for its end
    num_calls: int  # in a row
    roofline_share: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One series of figures."""

    dtype: str
    n: int
    threads: bool
    registered: bool = False
    emulated: bool = False

    def __str__(self) -> str:
        ranks = "threads" if self.threads else "processes"
        return f"all_reduce {self.dtype} {self.n} {ranks}{' registered' * self.registered}"


def slowest(comm: pycoll.Communicator, values: list[float]) -> list[float]:
    return comm.all_reduce(np.array(values), "max").tolist()


def arrays_of(comm: pycoll.Communicator, case: Case, nbytes: int) -> tuple[Any, Any, int]:
    """Collective. Input and output of this rank: torch's on a GPU, else DeviceArrays.

    Returns:
        Both, and how many elements of the output are wrong after one all_reduce.
    """
    own, expected = comm.rank + 1, sum(range(1, comm.size + 1))
    if case.emulated:
        kind = numpy_dtype(case.dtype)
        count = max(nbytes // kind.itemsize, 1)
        make = partial(comm.empty, device=0) if case.registered else DeviceArray.empty
        x, out = make(count, case.dtype), make(count, case.dtype)
        x.copy_from(np.full(count, own, kind))
        comm.all_reduce(x, out=out)
        comm.synchronize()
        return x, out, int(np.count_nonzero(out.numpy().astype(np.float64) != expected))
    import torch

    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    count = max(nbytes // kind.itemsize, 1)
    make = partial(comm.empty if case.registered else torch.empty, device="cuda:0")
    x, out = make(count, dtype=kind), make(count, dtype=kind)
    x.fill_(own)
    comm.all_reduce(x, out=out)
    comm.synchronize()
    return x, out, int((out != expected).sum())


def measure(comm: pycoll.Communicator, case: Case, nbytes: int) -> Figures:
    """Collective. The result is checked, outside of what is timed."""
    x, out, wrong = arrays_of(comm, case, nbytes)
    algorithm = comm.flight_record()[-1]["algorithm"]
    if slowest(comm, [wrong])[0] != 0:
        raise AssertionError(f"{case}, {nbytes} B: wrong elements on some rank")
    num_calls = num_calls_for(nbytes)

    queued, launched, ended = [], [], []
    for _ in range(SAMPLES):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            comm.all_reduce(x, out=out)
        launched.append(time.perf_counter() - start)
        comm.synchronize()
        queued.append(time.perf_counter() - start)
    for _ in range(3 * SAMPLES):
        comm.barrier()
        start = time.perf_counter()
        comm.all_reduce(x, out=out)
        comm.synchronize()
        ended.append(time.perf_counter() - start)

    def median_us(samples: list[float], per_call: int = 1) -> float:
        return statistics.median(slowest(comm, samples)) * 1e6 / per_call

    return Figures(
        nbytes,
        algorithm,
        median_us(queued, num_calls),
        median_us(launched, num_calls),
        median_us(ended),
        num_calls,
    )


def replay(comm: pycoll.Communicator, nbytes: int, num_calls: int) -> float:
    """us of one f32 all_reduce in a graph of several: no launch by the host between them."""
    stream = _core.DeviceStream()
    x = DeviceArray.of(np.zeros(max(nbytes // 4, 1), np.float32), stream=stream.handle)
    comm.all_reduce(x)
    comm.synchronize()
    stream.begin_capture()
    for _ in range(num_calls):
        comm.all_reduce(x)
    graph = stream.end_capture()
    samples = []
    for _ in range(SAMPLES):
        comm.barrier()
        start = time.perf_counter()
        stream.launch(graph)
        stream.synchronize()
        samples.append(time.perf_counter() - start)
    return statistics.median(slowest(comm, samples)) * 1e6 / num_calls


def on_ranks(work: Callable[[pycoll.Communicator], Any], n: int, threads: bool) -> Any:
    """Returns rank 0's result. Threads run in a child process: this one uses no device."""
    if not threads:
        return pycoll.run_ranks(work, n, timeout_s=TIMEOUT_S)[0]
    within = lambda _: pycoll.run_ranks(work, n, threads=True, timeout_s=TIMEOUT_S)[0]  # noqa: E731
    return pycoll.run_ranks(within, 1)[0]


def run_case(case: Case, sizes: list[int], ceiling: float | None, until: float) -> dict[str, Any]:
    """Rows of one series, and a note of sizes for which the time was not enough.

    Args:
        case: The series to measure.
        sizes: In bytes, ascending.
        ceiling: The rate of copies, in bytes read and written per second; None: not known.
        until: time.monotonic() after which no size is begun.
    """

    def work(comm: pycoll.Communicator) -> list[Figures]:
        figures = []
        for nbytes in sizes:
            late = slowest(comm, [float(time.monotonic() > until)])[0]
            if late:
                break
            figures.append(measure(comm, case, nbytes))
        return figures

    rows = []
    for row in on_ranks(work, case.n, case.threads):
        share = roofline_share(case.n, row, ceiling)
        rows.append(asdict(row) | {"roofline_share": share})
    missing = sizes[len(rows) :]
    return {"rows": rows} | ({"note": f"no time was left for {missing} B"} if missing else {})


def roofline_share(n: int, row: Figures, ceiling: float | None) -> float | None:
    """The share of the rate of copies that all ranks on one device reach; None for short ones."""
    name, _, protocol = row.algorithm.partition("/")
    if ceiling is None or row.nbytes < MIN_ROOFLINE_BYTES or protocol not in ("simple", "direct"):
        return None
    moved = n * traffic("all_reduce", name, n, protocol == "direct").moved * row.nbytes
    return moved / (row.queued_us / 1e6) / ceiling


def copy_ceiling(nbytes: int, emulated: bool) -> float:
    """Bytes read and written per second by a copy on the device; the best of several samples."""

    def work(_: pycoll.Communicator) -> float:
        if emulated:
            src, dst = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            copy, wait = lambda: np.copyto(dst, src), lambda: None
        else:
            import torch

            from_, to = (torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
            copy, wait = lambda: to.copy_(from_), torch.cuda.synchronize
        best = math.inf
        for _ in range(SAMPLES):
            copy()
            wait()
            start = time.perf_counter()
            for _ in range(5):
                copy()
            wait()
            best = min(best, (time.perf_counter() - start) / 5)
        return 2 * nbytes / best

    return pycoll.run_ranks(work, 1)[0]
