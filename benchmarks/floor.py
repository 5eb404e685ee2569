"""The floor: the time that no collective of one host can beat, measured beside the libraries.

Every input must be read and every output written, by however many cores there are, and nothing can
be done before one cache line has flown from core to core:

    floor = flight + time in which both cores, at once, read and write the bytes that must be

The time is measured, not computed from a bandwidth: floor.cc runs the innermost loop of each
collective on both cores, over memory that both reach without a copy, as often as the benchmark
does. Waiting, synchronising more than once, calling, and switching between ranks are free.

Ranks do not reach each other's new arrays, so bytes are copied by the kernel or twice. For 2 ranks,
floor_new.cc measures the fastest way to do that between two processes that do nothing else.

Both take turns like the libraries, since what two cores can do changes from minute to minute.
"""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import suppress
from pathlib import Path

from jobs import OWN_GROUP, STOP_TIMEOUT_S, TURN_TIMEOUT_S, UnsupportedError
from peers import PeerError

from pycoll.bench.case import Case

# The loop of each collective, and how many bytes of each of its operands all cores together pass
# over, in messages of n ranks. In all: read inputs plus written outputs, each once.
LOOPS = {
    "all_reduce": ("2to2", lambda n: n / 2),  # n messages read two at a time, n written
    "reduce_scatter": ("2to1", lambda n: n / 2),  # n read, one written
    "all_gather": ("1to2", lambda n: n / 2),  # one read, n written
    "all_to_all": ("1to1", lambda n: n),  # n read, n written
    "broadcast": ("1to1", lambda n: n - 1),  # the root has it already; n - 1 written
    "reduce": ("2to1", lambda n: n / 2),  # n read, one written
    "gather": ("1to1", lambda n: 1),  # n blocks, which are one message, read and written
    "scatter": ("1to1", lambda n: 1),
}
FLIGHT = "2to2 2"  # a request of floor.cc that takes hardly longer than one flight
NEW_NBYTES = 64 << 10  # the smallest message of new arrays, and what all are multiples of


def loop_request(case: Case) -> str:
    """What floor.cc is asked for: a loop, and the bytes of each operand for each of two cores."""
    loop, messages = LOOPS[case.collective]
    return f"{loop} {max(1, round(messages(case.num_ranks) * case.nbytes / 2))}"


def new_request(case: Case) -> str:
    """What floor_new.cc is asked for.

    Raises:
        UnsupportedError: It measures other numbers of ranks and smaller messages not at all.
    """
    if case.num_ranks != 2 or case.nbytes % NEW_NBYTES != 0:
        raise UnsupportedError("the floor of new arrays is measured for 2 ranks, from 64 KiB on")
    return f"{case.collective} {case.nbytes}"


# By the name in the record: the program and its requests.
FLOORS = {"floor": ("floor.cc", loop_request), "floor_new": ("floor_new.cc", new_request)}


class FloorJob:
    """A program that takes turns as a library does. See jobs.Job.

    Raises:
        PeerError: There is one core only, no compiler, or the program cannot be compiled.
    """

    def __init__(self, name: str, bench_dir: Path) -> None:
        source, self._request_of = FLOORS[name]
        self.name, self._request = name, ""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise PeerError(f"{name}: needs two cores, and this process may use one")
        binary = compiled(Path(__file__).with_name(source), bench_dir)
        self._process = subprocess.Popen(
            [binary, *map(str, cores[:2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **OWN_GROUP,
        )

    def prepare(self, case: Case) -> None:
        """Notes the message.

        Raises:
            UnsupportedError: This floor is not measured for it.
        """
        self._request = self._request_of(case)

    def check(self) -> None:
        """Nothing: it has no result."""

    def time_blocks(self, warmup: int, num_calls: int, num_blocks: int) -> list[float]:
        """Seconds of so many calls, once for each block."""
        return [num_calls * self._measure_us(self._request) * 1e-6 for _ in range(num_blocks)]

    def flight_us(self) -> float:
        """One way of a cache line from core to core. Takes 70 ms."""
        return self._measure_us(FLIGHT)

    def _measure_us(self, request: str) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        answered = select.select([self._process.stdout], [], [], TURN_TIMEOUT_S)[0]
        answer = self._process.stdout.readline() if answered else ""
        if not answer:
            raise PeerError(f"{self.name}: no answer to {request!r}")
        return float(answer)

    def stop(self) -> None:
        """Ends the program."""
        with suppress(OSError):
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        self._process.kill()
        self._process.wait()


def compiled(source: Path, bench_dir: Path) -> Path:
    """Compiles a program with g++ (or $CXX), once for each state of its source.

    Raises:
        PeerError: It cannot be compiled.
    """
    binary = bench_dir / source.stem
    if binary.exists() and binary.stat().st_mtime > source.stat().st_mtime:
        return binary
    bench_dir.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++20", "-O3", "-march=native", "-pthread"]
    command = [os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(binary)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    except FileNotFoundError as error:
        raise PeerError(f"{command[0]} not found: install g++, or set CXX") from error
    except subprocess.SubprocessError as error:
        stderr = getattr(error, "stderr", "") or ""
        raise PeerError(f"{' '.join(command)} failed: {error}\n{stderr}") from error
    return binary
