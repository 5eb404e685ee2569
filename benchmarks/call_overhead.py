"""What a small call costs from Python and from C++: the library's own code, and with two ranks.

python benchmarks/call_overhead.py          (after `make benchmarks`)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from jobs import Job
from peers import LIBRARIES
from rich.console import Console
from rich.table import Table

import pycoll
from pycoll.bench.case import Case
from pycoll.bench.record import Record
from pycoll.bench.timing import Effort, measure
from pycoll.local_ranks import local_communicators

ROOT = Path(__file__).resolve().parent.parent
BINARIES = ROOT / "build" / "cmake" / "benchmarks"
ROUNDS, CALLS = 9, 20_000


def ns_per_call(call: Callable[[], object], calls: int = CALLS) -> float:
    """CPU time of back-to-back calls that do not wait: other processes do not count."""
    for _ in repeat(None, calls // 10):
        call()
    start_ns = time.thread_time_ns()
    for _ in repeat(None, calls):
        call()
    return (time.thread_time_ns() - start_ns) / calls


def python_alone() -> dict[str, float]:
    """As call_overhead.cc, from Python with NumPy: one rank, and two that one thread plays."""
    x, y = np.ones(1, np.float32), np.zeros(1, np.float32)
    (alone,) = local_communicators(1)
    root, other = local_communicators(2)

    def both() -> None:
        root.broadcast(x, 0)
        other.broadcast(y, 0)

    with alone, root, other:
        one_rank = ns_per_call(lambda: alone.all_reduce(x, "sum", y))
        empty = ns_per_call(lambda: None)
        return {"one_rank_ns": one_rank - empty, "loopback_ns": (ns_per_call(both) - empty) / 2}


def cpp_alone(binaries: Path) -> dict[str, float]:
    command = [str(binaries / "call_overhead")]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cpp_two_ranks(binaries: Path) -> float:
    """ns of an all_reduce of 4 B by two processes, out of place as from Python."""
    record = ROOT / ".bench" / "all_reduce_perf.json"
    record.parent.mkdir(exist_ok=True)
    command = [str(binaries / "all_reduce_perf"), "-b", "4", "-e", "4", "-J", str(record)]
    subprocess.run(command, check=True, capture_output=True)
    row = next(row for case, row in Record.load(record).rows.items() if not case.in_place)
    record.unlink()
    return row.timing.median_s * 1e9


def measure_all(binaries: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, ns per call: by row, from C++ and from Python."""
    if not (binaries / "call_overhead").exists():
        raise typer.BadParameter(f"no programs in {binaries}: run `make benchmarks`")
    samples: dict[tuple[str, str], list[float]] = {}
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(pycoll.__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )
    job = Job(LIBRARIES["pycoll"], 2, Path(sys.prefix))
    try:
        job.prepare(Case.of_size("all_reduce", "f32", 2, 4))
        for _ in range(rounds):
            for name, ns in cpp_alone(binaries).items():
                samples.setdefault((name, "C++"), []).append(ns)
            for name, ns in python_alone().items():
                samples.setdefault((name, "Python"), []).append(ns)
            samples.setdefault(("two_ranks_ns", "C++"), []).append(cpp_two_ranks(binaries))
            two_ranks = measure(
                ["pycoll"], lambda name, *plan: job.time_blocks(0, *plan), Effort()
            )["pycoll"].median_s
            samples.setdefault(("two_ranks_ns", "Python"), []).append(two_ranks * 1e9)
    finally:
        job.stop()
    rows: dict[str, dict[str, float]] = {}
    for (name, language), values in samples.items():
        rows.setdefault(name, {})[language] = statistics.median(values)
    return rows


TITLES = {
    "one_rank_ns": "one rank, all_reduce of 4 B",
    "loopback_ns": "loopback that never waits, broadcast of 4 B",
    "two_ranks_ns": "two ranks, all_reduce of 4 B",
}


def main(
    binaries: Annotated[Path, typer.Option(help="Where the C++ programs are.")] = BINARIES,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = ROUNDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a small call from C++ and from Python; about 20 seconds."""
    rows = measure_all(binaries, rounds)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title="ns per call")
    for heading in ("", "C++", "Python, NumPy", "Python / C++"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, row in rows.items():
        ratio = row["Python"] / row["C++"]
        table.add_row(TITLES[name], f"{row['C++']:.0f}", f"{row['Python']:.0f}", f"{ratio:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
