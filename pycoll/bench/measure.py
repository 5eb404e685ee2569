"""Measures cases on the ranks of a running world: what `pycoll bench` runs on every rank."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.bench.adapters import Gloo, Pycoll, Unsupported
from pycoll.bench.case import Case
from pycoll.bench.record import Record, Row
from pycoll.bench.timing import WARMUP, Effort, measure_here, pinned, spread_ranks

if TYPE_CHECKING:
    from pycoll.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        effort: How much.
        warmup: Untimed calls first.
        mapped: Arrays of Communicator.empty.
        pinned: Each rank on a core of its own, where there are enough.
        show_progress: On standard error.
    """

    effort: Effort
    warmup: int = WARMUP
    mapped: bool = False
    pinned: bool = True
    show_progress: bool = False


def agree(comm: Communicator, value: float, op: str = "max") -> float:
    """The reduction of one value of each rank."""
    values = np.array([value], np.float64)
    comm.all_reduce(values, op)
    return float(values[0])


def gloo(comm: Communicator) -> Gloo:
    """gloo among the ranks of `comm`. Collective."""
    port = np.zeros(1, np.int64)
    if comm.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port[0] = server.getsockname()[1]
    comm.broadcast(port)
    address = f"tcp://127.0.0.1:{port[0]}"
    return Gloo(init_method=address, rank=comm.rank, world_size=comm.size)


def measure_message(
    comm: Communicator,
    adapters: dict[str, Any],
    case: Case,
    effort: Effort,
    warmup: int = WARMUP,
    barrier: Callable[[], object] | None = None,
) -> list[Row]:
    """Times one message by several libraries, interleaved. Collective.

    The results are checked before and after, outside of the timed calls.

    Args:
        comm: The ranks agree by it.
        adapters: The libraries, by their name in the rows; those that lack the case are left out.
        case: The message; its library is replaced by each name.
        effort: How much is measured.
        warmup: Untimed calls of each.
        barrier: Before each block of calls; None: that of `comm`.
    """
    prepared = {}
    for name, adapter in adapters.items():
        try:
            prepared[name] = adapter.prepare(case)
        except Unsupported:
            continue
    num_wrong = dict.fromkeys(prepared, 0)
    chosen = dict.fromkeys(prepared, case.algorithm)

    def check() -> None:
        for name, ready in prepared.items():
            ready.run(case, comm.rank)
            if isinstance(adapters[name], Pycoll) and case.algorithm == "auto":
                chosen[name] = adapters[name].comm.flight_record()[-1]["algorithm"]
            wrong = case.wrong_elements(comm.rank, ready.got).size
            num_wrong[name] += int(agree(comm, wrong, "sum"))

    check()
    calls = {name: ready.call for name, ready in prepared.items()}
    slowest = lambda value: agree(comm, value)  # noqa: E731
    timings = measure_here(calls, barrier or comm.barrier, slowest, effort, warmup)
    check()
    return [
        Row(case.of_library(name), timing, chosen[name], num_wrong[name])
        for name, timing in timings.items()
    ]


def measure(
    comm: Communicator,
    cases: list[Case],
    options: Options,
    record_path: Path | None,
    facts: dict[str, Any],
) -> list[Row]:
    """Measures the cases that the record does not have; rank 0 writes it after each. Collective.

    Args:
        comm: All ranks.
        cases: The cases; their libraries are pycoll or gloo.
        options: How.
        record_path: The record, on rank 0; None: none is kept.
        facts: The facts of the record.

    Returns:
        The rows of rank 0, in the order of the cases; elsewhere none.
    """
    spread_ranks(comm)
    record = Record.open(record_path, facts) if comm.rank == 0 else None
    start_s, measured = time.monotonic(), 0
    rows: list[Row] = []
    adapters: dict[str, Any] = {"pycoll": Pycoll(comm, options.mapped)}
    with ExitStack() as stack:
        if options.pinned:
            stack.enter_context(pinned(comm.rank, comm.size))
        for i, case in enumerate(cases):
            row = record.find(case) if record else None
            if not agree(comm, 1 if comm.rank == 0 and row is None else 0):
                rows += [row] if row else []
                continue
            if record and options.show_progress:
                left_s = (time.monotonic() - start_s) / max(1, measured) * (len(cases) - i)
                left = f", about {left_s:.0f} s left" if measured else ""
                _say(f"{i + 1} of {len(cases)}: {case.series}, {case.nbytes} B{left}")
            if case.library not in adapters:
                adapters[case.library] = gloo(comm)
            one = {case.library: adapters[case.library]}
            found = measure_message(comm, one, case, options.effort, options.warmup)
            measured += 1
            if record:
                record.add(*found)
                rows += found
    if record and options.show_progress:
        _say("")
    return rows


def _say(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
