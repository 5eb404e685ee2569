"""The floor: the time that no collective of one host can beat, from what floor.cc measures.

Every input must be read and every output written, by however many cores there are, and nothing can
be done before one cache line has flown from core to core:

    floor = flight + time in which both cores, at once, read and write the bytes that must be

The time is measured, not computed from a bandwidth: floor.cc runs the innermost loop of each
collective on both cores, over memory that both reach without a copy, as often as the benchmark
does. Waiting, synchronising more than once, calling, and switching between ranks are free.

Ranks do not reach each other's new arrays, so bytes are copied by the kernel or twice. For 2 ranks,
floor_new.cc measures the fastest way to do that between two processes that do nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SOURCE, SOURCE_NEW = (Path(__file__).with_name(name) for name in ("floor.cc", "floor_new.cc"))

# The loop of each collective, and how many bytes of each of its operands all cores together pass
# over, in messages of n ranks. In all: read inputs plus written outputs, each once.
LOOPS = {
    "all_reduce": ("2to2", lambda n: n / 2),  # n messages read two at a time, n written
    "reduce_scatter": ("2to1", lambda n: n / 2),  # n read, one written
    "all_gather": ("1to2", lambda n: n / 2),  # one read, n written
    "all_to_all": ("1to1", lambda n: n),  # n read, n written
    "broadcast": ("1to1", lambda n: n - 1),  # the root has it already; n - 1 written
}


@dataclass(frozen=True, slots=True)
class Floor:
    """The speed of two cores of this machine.

    Attributes:
        flight_us: One-way time of a cache line from core to core.
        both_cores_us: By loop ("2to2": two sources, two destinations), then by the bytes of each
            operand that a core passes over: the time until both cores are done.
        new_us: Times of new arrays of 2 ranks, by collective and bytes. Empty: not measured.
    """

    flight_us: float
    both_cores_us: dict[str, dict[int, float]]
    new_us: dict[str, dict[int, float]] = field(default_factory=dict)

    def us(self, collective: str, n: int, nbytes: int) -> float:
        """The floor of a message of nbytes among n ranks."""
        loop, messages = LOOPS[collective]
        return self.flight_us + between(self.both_cores_us[loop], messages(n) * nbytes / 2)

    def us_new(self, collective: str, n: int, nbytes: int) -> float | None:
        """The floor if the arrays are new; None: it was not measured for such messages."""
        times_us = self.new_us.get(collective, {}) if n == 2 else {}
        return between(times_us, nbytes) if times_us and nbytes >= min(times_us) else None

    def as_record(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self)

    @staticmethod
    def of_record(record: dict[str, Any]) -> Floor:
        """From the JSON file. Older ones have no times of new arrays."""
        both, new = (by_bytes(record.get(name, {})) for name in ("both_cores_us", "new_us"))
        return Floor(record["flight_us"], both, new)


def by_bytes(stored: dict[str, dict[str, float]]) -> dict[str, dict[int, float]]:
    return {name: {int(k): us for k, us in times.items()} for name, times in stored.items()}


def between(times_us: dict[int, float], nbytes: float) -> float:
    """The time at nbytes: linear between measured sizes; beyond them, at the nearest one's rate."""
    sizes = sorted(times_us)
    if nbytes <= sizes[0]:
        return times_us[sizes[0]] * nbytes / sizes[0]
    for low, high in zip(sizes, sizes[1:], strict=False):
        if nbytes <= high:
            share = (nbytes - low) / (high - low)
            return times_us[low] + share * (times_us[high] - times_us[low])
    return times_us[sizes[-1]] * nbytes / sizes[-1]


def measure_floor(bench_dir: Path) -> Floor:
    """Compiles floor.cc and floor_new.cc with g++ (or $CXX) and runs them on the first two cores
    allowed, for some 50 s.

    Raises:
        RuntimeError: There is one core only, no compiler, or a program failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("the floor needs two cores; this process may use one")
    bench_dir.mkdir(parents=True, exist_ok=True)
    measured, new = (
        measured_by(source, bench_dir / source.stem, cores[:2]) for source in (SOURCE, SOURCE_NEW)
    )
    return Floor.of_record(measured | {"flight_us": measured["flight_ns"] / 1e3, "new_us": new})


def measured_by(source: Path, binary: Path, cores: list[int]) -> dict[str, Any]:
    """The JSON that a program prints."""
    flags = ["-std=c++20", "-O3", "-march=native", "-pthread"]
    compile_ = [os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(binary)]
    printed = ""
    for command in (compile_, [str(binary), *map(str, cores)]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        except FileNotFoundError as error:
            raise RuntimeError(f"{command[0]} not found: install g++, or set CXX") from error
        except subprocess.SubprocessError as error:
            stderr = getattr(error, "stderr", "") or ""
            raise RuntimeError(f"{' '.join(command)} failed: {error}\n{stderr}") from error
        printed = done.stdout
    return json.loads(printed)
