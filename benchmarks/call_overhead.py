"""The library's own time of a small call, from Python and from C++; agreement.py has two ranks.

python benchmarks/call_overhead.py          (after `make benchmarks`)
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from pycoll.launch.local_ranks import local_communicators

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


def measure(binaries: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, ns per call: by row, from C++ and from Python."""
    if not (binaries / "call_overhead").exists():
        raise typer.BadParameter(f"no programs in {binaries}: run `make benchmarks`")
    samples: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for language, row in (("C++", cpp_alone(binaries)), ("Python", python_alone())):
            for name, ns in row.items():
                samples.setdefault(name, {}).setdefault(language, []).append(ns)
    return {
        name: {language: statistics.median(values) for language, values in row.items()}
        for name, row in samples.items()
    }


TITLES = {
    "one_rank_ns": "one rank, all_reduce of 4 B",
    "loopback_ns": "loopback that never waits, broadcast of 4 B",
}


def main(
    binaries: Annotated[Path, typer.Option(help="Where the C++ programs are.")] = BINARIES,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = ROUNDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a small call from C++ and from Python; about ten seconds."""
    rows = measure(binaries, rounds)
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
