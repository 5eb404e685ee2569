"""Measures cases; runs on every rank."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pycoll.bench.case import Case, Problem, info, numpy_dtype
from pycoll.bench.record import Record, Row

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

Call = Callable[[], object]
_LIMIT_S = 1.0  # of timed calls per case; large messages get fewer samples, at least 5
_FEWEST = 5
# A sample is a block of calls back to back: long enough for clock and barrier not to matter.
_BLOCK_S, _MOST_CALLS = 100e-6, 50


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    iterations: int
    warmup: int
    show_progress: bool
    mapped: bool = False  # arrays of Communicator.empty


def measure(
    comm: Communicator,
    cases: list[Case],
    effort: Effort,
    record_path: Path | None,
    question: dict[str, object],
) -> list[Row]:
    """All cases that the record does not have; rank 0 writes it after each.

    Args:
        comm: Of all ranks.
        cases: What to measure.
        effort: How much.
        record_path: The record, on rank 0; None: none is kept.
        question: What the record is about.

    Returns:
        The rows of rank 0, in the order of the cases; elsewhere none.
    """
    # New processes begin on their parent's core; one that wakes up is put on an idle one.
    for _ in range(20):
        time.sleep(0.005)
        comm.barrier()
    record = Record.open(record_path, question) if comm.rank == 0 else None
    start_s, measured = time.monotonic(), 0
    rows: list[Row | None] = []
    peers: dict[str, Callable[[Problem], tuple[Call, np.ndarray] | None]] = {}
    for i, case in enumerate(cases):
        row = record.find(case) if record else None
        if not _agree(comm, 1 if comm.rank == 0 and row is None else 0):
            rows.append(row)
            continue
        if record and effort.show_progress:
            left_s = (time.monotonic() - start_s) / max(1, measured) * (len(cases) - i)
            left = f", about {left_s:.0f} s left" if measured else ""
            _say(f"{i + 1} of {len(cases)}: {case.series}, {case.nbytes} B{left}")
        if case.library != "pycoll" and case.library not in peers:
            from pycoll.bench.peers import PEERS

            peers[case.library] = PEERS[case.library](comm)
        prepare = peers.get(case.library, lambda problem: pycoll_call(comm, problem, effort.mapped))
        row = _measure_one(comm, case, prepare, effort)
        measured += 1
        rows.append(row)
        if record and row:
            record.add(row)
    if record and effort.show_progress:
        _say("")
    return [row for row in rows if row] if record else []


def pycoll_call(
    comm: Communicator, problem: Problem, mapped: bool = False
) -> tuple[Call, np.ndarray]:
    """A call of pycoll, ready to run, and the array that will hold its result."""
    make = comm.empty if mapped else np.zeros
    case, n, rank = problem.case, problem.n, problem.rank
    dtype = numpy_dtype(case.dtype)
    brought = problem.brought(rank)
    x = make(brought.shape, dtype)
    x[...] = brought.astype(dtype)
    num_rows, block = int(x.shape[0]), int(x.shape[1])
    name = case.collective
    algorithm = None if case.algorithm == "auto" else case.algorithm
    if name == "barrier":
        return lambda: comm.barrier(algorithm=algorithm), x
    method = getattr(comm, name)
    if name == "broadcast":
        return lambda: method(x, 0, algorithm=algorithm), x
    num_rows = {"reduce_scatter": 1, "scatter": 1, "all_gather": n, "gather": n}.get(name, num_rows)
    out = make((num_rows, block), dtype)
    y = out if rank == 0 or name not in ("gather", "reduce") else None
    if name == "reduce":
        return lambda: method(x, 0, case.op, y, algorithm=algorithm), out
    if name in ("gather", "scatter"):
        return lambda: method(x, 0, y, algorithm=algorithm), out
    if info(name).has_op:
        return lambda: method(x, case.op, y, algorithm=algorithm), out
    return lambda: method(x, y, algorithm=algorithm), out


def _measure_one(
    comm: Communicator,
    case: Case,
    prepare: Callable[[Problem], tuple[Call, np.ndarray] | None],
    effort: Effort,
) -> Row | None:
    problem = Problem(case, comm.size, comm.rank)
    prepared = prepare(problem)
    if prepared is None:
        return None
    call, got = prepared
    call()
    num_wrong = problem.num_wrong(got) if case.library == "pycoll" else 0
    for _ in range(effort.warmup):
        call()
    # All ranks must make the same number of calls: rank 0 says how many.
    comm.barrier()
    once_s = _timed(call, 1)
    per_sample = max(1, min(round(_BLOCK_S / once_s), _MOST_CALLS))
    affordable = int(_LIMIT_S / (once_s * per_sample))
    most = max(min(effort.iterations, affordable), min(effort.iterations, _FEWEST))
    per_sample = _agree(comm, per_sample if comm.rank == 0 else 0)
    times_s = np.zeros(_agree(comm, most if comm.rank == 0 else 0))
    for i in range(times_s.size):
        comm.barrier()
        times_s[i] = _timed(call, per_sample)
    chosen = case.algorithm
    if case.library == "pycoll" and chosen == "auto":
        chosen = comm.flight_record()[-1]["algorithm"]  # with arrays as they have come to be
    comm.all_reduce(times_s, "max")  # the slowest rank's
    if case.library == "pycoll":
        num_wrong += problem.num_wrong(got)
    num_wrong = _agree(comm, num_wrong, "sum")
    slowest_s = sorted(times_s.tolist())
    median_s = statistics.median(slowest_s)
    algbw = problem.nbytes / median_s
    return Row(
        case=case,
        chosen=chosen,
        num_ranks=comm.size,
        nbytes=problem.nbytes,
        median_s=median_s,
        min_s=slowest_s[0],
        p99_s=slowest_s[-(-99 * len(slowest_s) // 100) - 1],
        algbw=algbw,
        busbw=algbw * info(case.collective).busbw_factor(comm.size),
        num_calls=times_s.size * per_sample,
        num_wrong=num_wrong,
    )


def _agree(comm: Communicator, value: int, op: str = "max") -> int:
    values = np.array([value], np.int64)
    comm.all_reduce(values, op)
    return int(values[0])


def _timed(call: Call, num_calls: int) -> float:
    """Seconds of one of so many calls."""
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    return max(time.perf_counter() - start_s, 1e-9) / num_calls


def _say(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
