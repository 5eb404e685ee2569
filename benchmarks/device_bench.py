"""Collectives on devices, timed: ranks as threads of one process, or as processes.

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
    collective: str = "all_reduce"
    op: str = "sum"

    def __str__(self) -> str:
        ranks = "threads" if self.threads else "processes"
        more = " registered" * self.registered + f" {self.op}" * (self.op != "sum")
        return f"{self.collective} {self.dtype} {self.n} {ranks}{more}"

    def counts(self, nbytes: int, itemsize: int) -> tuple[int, int]:
        """Elements of the input and of the output of a message of `nbytes`, as nccl-tests' size."""
        if self.collective == "all_reduce":
            return (max(nbytes // itemsize, 1),) * 2
        block = max(nbytes // itemsize // self.n, 1)
        return {
            "reduce_scatter": (self.n * block, block),
            "all_gather": (block, self.n * block),
            "all_to_all": (self.n * block, self.n * block),
        }[self.collective]

    def expected(self, count: int) -> np.ndarray:
        """An output of `count` elements, where rank r's input has r + 1 in all places."""
        if self.collective in ("all_gather", "all_to_all"):
            return np.repeat(np.arange(1.0, self.n + 1), count // self.n)
        total = self.n * (self.n + 1) / 2
        return np.full(count, total / self.n if self.op == "avg" else total)

    def call(self, comm: pycoll.Communicator, x: Any, out: Any) -> None:
        if self.collective in ("all_gather", "all_to_all"):
            getattr(comm, self.collective)(x, out=out)
        else:
            getattr(comm, self.collective)(x, self.op, out=out)


def slowest(comm: pycoll.Communicator, values: list[float]) -> list[float]:
    return comm.all_reduce(np.array(values), "max").tolist()


def arrays_of(comm: pycoll.Communicator, case: Case, nbytes: int) -> tuple[Any, Any, int]:
    """Collective. Input and output of this rank: torch's on a GPU, else DeviceArrays.

    Returns:
        Both, and how many elements of the output are wrong after one call.
    """
    own = comm.rank + 1
    if case.emulated:
        kind = numpy_dtype(case.dtype)
        make = partial(comm.empty, device=0) if case.registered else DeviceArray.empty
        x, out = (make(count, case.dtype) for count in case.counts(nbytes, kind.itemsize))
        x.copy_from(np.full(x.shape[0], own, kind))
        case.call(comm, x, out)
        comm.synchronize()
        expected = case.expected(out.shape[0])
        return x, out, int(np.count_nonzero(out.numpy().astype(np.float64) != expected))
    import torch

    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    make = partial(comm.empty if case.registered else torch.empty, device="cuda:0")
    x, out = (make(count, dtype=kind) for count in case.counts(nbytes, kind.itemsize))
    x.fill_(own)
    case.call(comm, x, out)
    comm.synchronize()
    expected = torch.from_numpy(case.expected(out.numel())).to(out.device)
    return x, out, int((out.double() != expected).sum())


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
            case.call(comm, x, out)
        launched.append(time.perf_counter() - start)
        comm.synchronize()
        queued.append(time.perf_counter() - start)
    for _ in range(3 * SAMPLES):
        comm.barrier()
        start = time.perf_counter()
        case.call(comm, x, out)
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
        share = roofline_share(case, row, ceiling)
        rows.append(asdict(row) | {"roofline_share": share})
    missing = sizes[len(rows) :]
    return {"rows": rows} | ({"note": f"no time was left for {missing} B"} if missing else {})


def roofline_share(case: Case, row: Figures, ceiling: float | None) -> float | None:
    """The share of the rate of copies that all ranks on one device reach; None for short ones."""
    name, _, protocol = row.algorithm.partition("/")
    if ceiling is None or row.nbytes < MIN_ROOFLINE_BYTES or protocol not in ("simple", "direct"):
        return None
    counted = traffic(case.collective, name, case.n, protocol == "direct")
    moved = case.n * counted.moved * row.nbytes
    return moved / (row.queued_us / 1e6) / ceiling


def ceilings(nbytes: int, emulated: bool) -> dict[str, Any]:
    """Bytes read and written per second by other libraries' plain kernels; the best of samples.

    Args:
        nbytes: Of each array.
        emulated: Whether NumPy's loops on the CPU take the place of torch and CuPy.

    Returns:
        A rate, or why there is none, for a copy, for a sum of two arrays, and for a sum of eight
        that are stacked, by library.
    """

    def rate(moved: int, run: Callable[[], Any], wait: Callable[[], Any]) -> float:
        best = math.inf
        for _ in range(SAMPLES):
            run()
            wait()
            start = time.perf_counter()
            for _ in range(5):
                run()
            wait()
            best = min(best, (time.perf_counter() - start) / 5)
        return moved / best

    def rates(library: Any, wait: Callable[[], Any], **where: Any) -> dict[str, float]:
        count = nbytes // 4
        a, b, c = (library.ones(count, dtype=library.float32, **where) for _ in range(3))
        stacked = library.ones((8, count // 8), dtype=library.float32, **where)
        axis = {"dim" if hasattr(library, "Tensor") else "axis": 0}
        of_eight = c[: count // 8]
        total = nbytes + nbytes // 8
        found = {
            "add": rate(3 * nbytes, lambda: library.add(a, b, out=c), wait),
            "sum of 8": rate(total, lambda: library.sum(stacked, out=of_eight, **axis), wait),
        }

        def copy() -> None:
            c[:] = a

        return {"copy": rate(2 * nbytes, copy, wait)} | found

    def work(_: pycoll.Communicator) -> dict[str, Any]:
        if emulated:
            return {"numpy": rates(np, lambda: None)}
        import torch

        made: dict[str, Any] = {"torch": rates(torch, torch.cuda.synchronize, device="cuda")}
        try:
            import cupy

            made["cupy"] = rates(cupy, cupy.cuda.Device().synchronize)
        except ImportError as error:
            made["cupy"] = f"skipped: {error}"
        return made

    return pycoll.run_ranks(work, 1)[0]
