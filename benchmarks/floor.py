"""The floor: the time that no all_reduce of one host can beat, from what floor.cc measures.

With c = min(ranks, cores) cores at work, each core must read at least 2(c-1)/c of the message from
other cores (the all_reduce bound of Patarasuk and Yuan, 2009, with the ranks of one core taken as
one), and nothing can be done before one cache line has flown from core to core:

    floor = max(flight, 2(c-1)/c * nbytes / rate)

Writing, adding, and switching between the ranks of one core are taken as free.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("floor.cc")


@dataclass(frozen=True, slots=True)
class Floor:
    """What two cores of this machine can do.

    Attributes:
        flight_us: One-way time of a cache line from core to core.
        read_gb_per_s: By tile size in bytes, the rate at which a core reads a tile that the other
            has just written.
        cores: How many cores the ranks may use.
    """

    flight_us: float
    read_gb_per_s: dict[int, float]
    cores: int

    def rate_gb_per_s(self, nbytes: int) -> float:
        """The best rate for a message of nbytes, which may travel in smaller tiles."""
        smallest = min(self.read_gb_per_s)
        return max(r for tile, r in self.read_gb_per_s.items() if tile <= max(nbytes, smallest))

    def all_reduce_us(self, n: int, nbytes: int) -> float:
        """The floor of an all_reduce of nbytes among n ranks."""
        busy = min(n, self.cores)
        must_read = 2 * (busy - 1) / busy * nbytes
        return max(self.flight_us, must_read / self.rate_gb_per_s(nbytes) / 1e3)


def measure_floor(bench_dir: Path) -> Floor:
    """Compiles floor.cc with g++ (or $CXX) and runs it on the first two cores allowed.

    Raises:
        RuntimeError: There is one core only, no compiler, or the program failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("the floor needs two cores; this process may use one")
    bench_dir.mkdir(parents=True, exist_ok=True)
    binary = bench_dir / "floor"
    flags = ["-std=c++20", "-O3", "-march=native", "-pthread"]
    compile_ = [os.environ.get("CXX", "g++"), *flags, str(SOURCE), "-o", str(binary)]
    printed = ""
    for command in (compile_, [str(binary), str(cores[0]), str(cores[1])]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        except FileNotFoundError as error:
            raise RuntimeError(f"{command[0]} not found: install g++, or set CXX") from error
        except subprocess.SubprocessError as error:
            stderr = getattr(error, "stderr", "") or ""
            raise RuntimeError(f"{' '.join(command)} failed: {error}\n{stderr}") from error
        printed = done.stdout
    measured = json.loads(printed)
    rates = {int(tile): rate for tile, rate in measured["read_gb_per_s"].items()}
    return Floor(measured["flight_ns"] / 1e3, rates, len(cores))
