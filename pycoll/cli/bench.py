"""`pycoll bench`: measures collectives on local ranks, with the columns of nccl-tests."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pycoll.cli.common import (
    FAILED,
    CollectiveArgument,
    ModulesOption,
    busbw_factor,
    choose_algorithms,
    console,
    load_modules,
    new_table,
)
from pycoll.cli.units import format_nbytes, format_rate, format_seconds, parse_sizes
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

EPILOG = """[bold]Examples[/bold]

  pycoll bench -n 2 --sizes 4:64M

  pycoll bench all_reduce -n 4 --algorithm ring,two_shot --sizes 1K,1M -o speed.png

  pycoll bench broadcast -n 4 --sizes 1M --json
"""

_DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
}
_LIMIT_S = 1.0  # of timed calls per size; large messages get fewer calls, at least 5


@dataclass(frozen=True, slots=True)
class _Case:
    collective: str
    algorithm: str | None  # None: pycoll chooses
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Sample:
    """One case on one rank."""

    chosen: str
    times_s: list[float]
    num_wrong: int


@dataclass(frozen=True, slots=True)
class _Row:
    """One case on all ranks; times are those of the slowest rank."""

    collective: str
    algorithm: str
    num_ranks: int
    dtype: str
    nbytes: int
    median_s: float
    min_s: float
    algbw: float  # bytes per second, at the median
    busbw: float
    num_calls: int
    num_wrong: int


def bench(
    collective: CollectiveArgument = "all_reduce",
    n: Annotated[int, typer.Option("-n", help="Number of ranks.", min=1)] = 2,
    sizes: Annotated[
        str, typer.Option("--sizes", "-b", help="Bytes: 1M, 4,1K, 4:64M or 4:64M:FACTOR.")
    ] = "4:64M:4",
    algorithm: Annotated[
        str,
        typer.Option("--algorithm", "-a", help="auto, a name, NAME/PROTOCOL, a list, or all."),
    ] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", "-d", help=", ".join(_DTYPES))] = "f32",
    iterations: Annotated[
        int, typer.Option("--iterations", help="Timed calls per size, at most.", min=1)
    ] = 100,
    warmup: Annotated[int, typer.Option("--warmup", help="Untimed calls first.", min=0)] = 5,
    threads: Annotated[
        bool, typer.Option("--threads", help="Ranks are threads of one process.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Plot bus bandwidth: .svg or .png.")
    ] = None,
    module: ModulesOption = None,
) -> None:
    """Measure a collective on local ranks: time, bandwidth, and whether the result is right.

    A call's time is that of its slowest rank. Results are checked at every size, outside of the
    timed region; the exit status is 1 when an element is wrong.
    """
    load_modules(module)
    cases = _cases(collective, algorithm, sizes, dtype)
    from pycoll.launch import run_ranks

    ranks = run_ranks(_measure, n, cases, iterations, warmup, sys.stderr.isatty(), threads=threads)
    rows = [_row(case, [rank[i] for rank in ranks]) for i, case in enumerate(cases)]
    if as_json:
        _print_json(rows)
    else:
        _print_table(rows)
    if out is not None:
        _plot(rows, out)
        typer.echo(f"wrote {out}", err=True)
    if any(row.num_wrong for row in rows):
        raise typer.Exit(FAILED)


def _cases(collective: str, algorithm: str, sizes: str, dtype: str) -> list[_Case]:
    if collective not in ("all_reduce", "broadcast"):
        raise UsageError(f"bench: expected all_reduce or broadcast, got {collective!r}")
    if dtype not in _DTYPES:
        raise UsageError(
            f"bench: expected --dtype to be one of {', '.join(_DTYPES)}, got {dtype!r}"
        )
    names: list[str | None] = []
    for name in algorithm.split(","):
        if name == "auto":
            names.append(None)
        elif name == "all":
            names += choose_algorithms(collective, "all")
        else:
            choose_algorithms(collective, name.partition("/")[0])
            names.append(name)
    return [_Case(collective, name, size, dtype) for size in parse_sizes(sizes) for name in names]


def _measure(
    comm: Communicator, cases: list[_Case], iterations: int, warmup: int, show_progress: bool
) -> list[_Sample]:
    """Runs on every rank."""
    # New processes begin on their parent's core; one that wakes up is put on an idle one.
    for _ in range(20):
        time.sleep(0.005)
        comm.barrier()
    samples = []
    for i, case in enumerate(cases):
        if show_progress and comm.rank == 0:
            name = case.algorithm or "auto"
            status = f"{i + 1} of {len(cases)}: {name}, {format_nbytes(case.nbytes)}"
            print(f"\r\x1b[K{status}", end="", file=sys.stderr, flush=True)
        samples.append(_measure_one(comm, case, iterations, warmup))
    if show_progress and comm.rank == 0:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return samples


def _measure_one(comm: Communicator, case: _Case, iterations: int, warmup: int) -> _Sample:
    import numpy as np

    dtype = np.dtype(_DTYPES[case.dtype])
    count = max(1, case.nbytes // dtype.itemsize)
    # Small integers: their sum is exact in every dtype.
    pattern = np.arange(count, dtype=np.int64) % 5
    x = (pattern + comm.rank % 3).astype(dtype)
    if case.collective == "all_reduce":
        y = np.zeros_like(x)
        expected = pattern * comm.size + sum(rank % 3 for rank in range(comm.size))

        def call() -> None:
            comm.all_reduce(x, out=y, algorithm=case.algorithm)
    else:
        y, expected = x, pattern

        def call() -> None:
            comm.broadcast(y, root=0, algorithm=case.algorithm)

    call()
    num_wrong = int(np.count_nonzero(y != expected.astype(dtype)))
    for _ in range(warmup):
        call()
    # All ranks must make the same number of calls: rank 0 says how many.
    calls = np.array([_affordable(call, comm, iterations)], np.int64)
    comm.broadcast(calls, root=0)
    times_s = []
    for _ in range(int(calls[0])):
        comm.barrier()
        start = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start)
    num_wrong += int(np.count_nonzero(y != expected.astype(dtype)))
    chosen = case.algorithm or _chosen(comm.explain(case.collective, x.nbytes, case.dtype))
    return _Sample(chosen, times_s, num_wrong)


def _affordable(call: Any, comm: Communicator, iterations: int) -> int:
    comm.barrier()
    start = time.perf_counter()
    call()
    once_s = max(time.perf_counter() - start, 1e-9)
    return max(min(iterations, int(_LIMIT_S / once_s)), min(iterations, 5))


def _chosen(explanation: str) -> str:
    """`ring/simple`, from the first line of Communicator.explain()."""
    return explanation.splitlines()[0].rpartition(": ")[2].partition(" over ")[0]


def _row(case: _Case, samples: list[_Sample]) -> _Row:
    slowest = [max(times) for times in zip(*(s.times_s for s in samples), strict=True)]
    median_s = statistics.median(slowest)
    n = len(samples)
    algbw = case.nbytes / median_s
    return _Row(
        collective=case.collective,
        algorithm=samples[0].chosen,
        num_ranks=n,
        dtype=case.dtype,
        nbytes=case.nbytes,
        median_s=median_s,
        min_s=min(slowest),
        algbw=algbw,
        busbw=algbw * busbw_factor(case.collective, n),
        num_calls=len(slowest),
        num_wrong=sum(s.num_wrong for s in samples),
    )


def _print_table(rows: list[_Row]) -> None:
    first = rows[0]
    title = f"{first.collective}, {first.num_ranks} ranks, {first.dtype}"
    headers = ("algorithm", "size", "median", "min", "algbw", "busbw", "calls", "#wrong")
    table = new_table(*headers, title=title)
    for row in rows:
        table.add_row(
            row.algorithm,
            format_nbytes(row.nbytes),
            format_seconds(row.median_s),
            format_seconds(row.min_s),
            format_rate(row.algbw),
            format_rate(row.busbw),
            str(row.num_calls),
            str(row.num_wrong),
        )
    console().print(table)


def _print_json(rows: list[_Row]) -> None:
    import json
    import os
    import platform

    import pycoll

    machine = {
        "cpu": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "pycoll": pycoll.__version__,
    }
    typer.echo(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))


def _plot(rows: list[_Row], path: Path) -> None:
    from pycoll.draw.style import image_format, matplotlib_module, render

    chosen = image_format(path, None, ("svg", "png"))
    matplotlib_module()
    from matplotlib.figure import Figure

    fig = Figure(figsize=(8, 5), layout="constrained")
    ax = fig.add_subplot()
    series: dict[str, list[_Row]] = {}
    for row in rows:
        series.setdefault(row.algorithm, []).append(row)
    for name, points in series.items():
        ax.plot([p.nbytes for p in points], [p.busbw / 1e9 for p in points], "o-", label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("message, bytes")
    ax.set_ylabel("busbw at the median, GB/s")
    ax.set_title(f"{rows[0].collective}, {rows[0].num_ranks} ranks, {rows[0].dtype}")
    ax.grid(True, which="major", alpha=0.3)
    ax.legend()
    path.write_bytes(render(fig, chosen))
