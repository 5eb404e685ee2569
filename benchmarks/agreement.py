"""Do the harnesses agree? One message, timed by each of them and by a plain loop, interleaved.

    python benchmarks/agreement.py          (after `make benchmarks`, on a quiet machine)

The plain loop is 3,000 calls in a row behind a barrier, the median of 15 loops. The other columns
are `pycoll bench`, compare.py's measurement of pycoll, and all_reduce_perf, without and with the
interpreter's share of a call: a plain loop of Python with one rank less the same loop in C++. Each
column is the lowest of its rounds: the host of a virtual machine moves its cores, and then the same
loop takes up to three times as long for a while, whichever harness runs. The exit status is 1 when
two of the first three columns are more than 20 % apart, or the last one is so far from the plain
loop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from call_overhead import cpp_alone, python_alone
from jobs import Job
from measure import QUICK, measure_row
from peers import LIBRARIES

import pycoll
from pycoll.bench.case import Case
from pycoll.bench.record import Record
from pycoll.bench.timing import pinned, spread_ranks

ROOT = Path(__file__).resolve().parent.parent
BINARIES = ROOT / "build" / "cmake" / "benchmarks"
SIZES = (4, 1 << 10, 16 << 10, 1 << 20)
NUM_CALLS = 3000
NUM_LOOPS = 15
PAUSE_S = 0.02  # so that a slow spell does not cover all loops
HARNESSES = ("plain loop", "pycoll bench", "compare.py", "all_reduce_perf", "perf + Python")
CLOSE = 1.2


def plain_loop(comm: pycoll.Communicator, sizes: tuple[int, ...]) -> dict[int, float]:
    """Seconds of a call, by size; on every rank those of the slowest one."""
    times_s = {}
    spread_ranks(comm)
    with pinned(comm.rank, comm.size):
        for nbytes in sizes:
            x, out = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
            for _ in range(100):  # arrays that are used repeatedly are registered by then
                comm.all_reduce(x, "sum", out)
            loops_s = np.zeros(NUM_LOOPS)
            for i in range(NUM_LOOPS):
                time.sleep(PAUSE_S)
                comm.barrier()
                start_s = time.perf_counter()
                for _ in range(NUM_CALLS):
                    comm.all_reduce(x, "sum", out)
                loops_s[i] = time.perf_counter() - start_s
            comm.all_reduce(loops_s, "max")
            times_s[nbytes] = float(np.median(loops_s)) / NUM_CALLS
    return times_s


def bench() -> dict[int, float]:
    sizes = ",".join(map(str, SIZES))
    command = [sys.executable, "-m", "pycoll", "bench", "-n", "2", "--sizes", sizes, "--json", "-"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {row["nbytes"]: row["median_s"] for row in json.loads(done.stdout)["rows"]}


def perf(binaries: Path) -> dict[int, float]:
    times_s = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "perf.json"
        for nbytes in SIZES:
            size = ["-b", str(nbytes), "-e", str(nbytes)]
            command = [str(binaries / "all_reduce_perf"), *size, "-J", str(path)]
            subprocess.run(command, check=True, capture_output=True)
            for case, row in Record.load(path).rows.items():
                if not case.in_place:
                    times_s[case.nbytes] = row.timing.median_s
    return times_s


def compare() -> dict[int, float]:
    def failed(name: str, reason: Exception) -> None:
        raise reason

    job = Job(LIBRARIES["pycoll"], 2, Path(sys.prefix))
    times_s = {}
    try:
        for nbytes in SIZES:
            case = Case.of_size("all_reduce", "f32", 2, nbytes)
            (row,) = measure_row({"pycoll": job}, case, QUICK, failed)
            times_s[nbytes] = row.timing.median_s
    finally:
        job.stop()
    return times_s


def main(
    binaries: Annotated[Path, typer.Option(help="Where the C++ programs are.")] = BINARIES,
    rounds: Annotated[int, typer.Option(help="In each of which all have a turn.", min=1)] = 9,
) -> None:
    """Compare the harnesses; about two minutes."""
    root = str(Path(pycoll.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    found: dict[str, list[dict[int, float]]] = {name: [] for name in HARNESSES}
    alone_ns: dict[str, list[float]] = {"Python": [], "C++": []}
    for _ in range(rounds):
        found["plain loop"].append(pycoll.run_ranks(plain_loop, 2, SIZES)[0])
        found["pycoll bench"].append(bench())
        found["compare.py"].append(compare())
        found["all_reduce_perf"].append(perf(binaries))
        alone_ns["Python"].append(python_alone()["one_rank_ns"])
        alone_ns["C++"].append(cpp_alone(binaries)["one_rank_ns"])
    share_s = (min(alone_ns["Python"]) - min(alone_ns["C++"])) * 1e-9
    found["perf + Python"] = [
        {nbytes: time_s + share_s for nbytes, time_s in one.items()}
        for one in found["all_reduce_perf"]
    ]
    print("all_reduce, f32, 2 ranks: lowest us of the rounds, and ratio to the plain loop")
    print("bytes".rjust(8), *(name.rjust(22) for name in HARNESSES), "furthest".rjust(9))
    worst = 1.0
    for nbytes in SIZES:
        times_s = {name: min(one[nbytes] for one in rows) for name, rows in found.items()}
        plain_s = times_s["plain loop"]
        texts = (f"{t * 1e6:.3f} ({t / plain_s:.2f})".rjust(22) for t in times_s.values())
        *from_python, _, with_python_s = times_s.values()
        apart = max(
            max(from_python) / min(from_python), with_python_s / plain_s, plain_s / with_python_s
        )
        worst = max(worst, apart)
        print(f"{nbytes:8d}", *texts, f"{apart:9.2f}")
    print(f"furthest apart: {worst:.2f}; close means at most {CLOSE:.2f}")
    if worst > CLOSE:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
