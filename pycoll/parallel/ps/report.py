"""What a run has counted: staleness, bytes, dropped pushes and waiting, as a table and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pycoll.parallel.core.ledger import Ledger

_LATE = 1.5  # times the others' time: a worker above that is named


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of all servers, and of the worker that asked.

    Attributes:
        staleness: Number of updates of shards by their staleness: the updates of others between
            the pull and the push of a gradient.
        dropped: Number of pushes to shards that were dropped, by "late" or "stale".
        nbytes: Calls and bytes by kind of message: of this worker, with its answers, and "copy" of
            all servers.
        waited_s: Seconds that the pulls of each worker waited for other workers.
        computing_s: Median seconds between a pull and the next push of each living worker, in its
            last 10 steps.
        clocks: Clock of each living worker.
        largest_gap: Most clocks by which a worker that pulled was ahead of the slowest one.
        worker: The worker that asked.
        pulling_s: Seconds in its pulls.
        pushing_s: Seconds in its pushes.
    """

    staleness: Mapping[int, int]
    dropped: Mapping[str, int]
    nbytes: Mapping[str, tuple[int, int]]
    waited_s: Mapping[int, float]
    computing_s: Mapping[int, float]
    clocks: Mapping[int, int]
    largest_gap: int
    worker: int
    pulling_s: float
    pushing_s: float

    @property
    def num_updates(self) -> int:
        """Updates of shards."""
        return sum(self.staleness.values())

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the updates; 0 without any."""
        total = sum(staleness * times for staleness, times in self.staleness.items())
        return total / max(self.num_updates, 1)

    @property
    def straggler(self) -> tuple[int, float] | None:
        """The worker that computes longest, and its time divided by the median of the others'."""
        if len(self.computing_s) < 2:
            return None
        worker = max(self.computing_s, key=self.computing_s.__getitem__)
        others = [seconds for other, seconds in self.computing_s.items() if other != worker]
        return worker, self.computing_s[worker] / max(median(others), 1e-9)

    def __str__(self) -> str:
        lines = [f"updates {self.num_updates}, mean staleness {self.mean_staleness:.2f}"]
        lines += [
            f"  staleness {staleness:>3}  {times:>8}  {'#' * round(40 * times / self._most)}"
            for staleness, times in sorted(self.staleness.items())
        ]
        for why, times in sorted(self.dropped.items()):
            lines.append(f"dropped as {why}: {times}")
        lines.append(f"largest gap of clocks: {self.largest_gap}")
        lines += [
            f"worker {worker}: clock {self.clocks.get(worker, '-')}, waited "
            f"{self.waited_s.get(worker, 0.0):.2f} s for others"
            for worker in sorted({*self.clocks, *self.waited_s})
        ]
        if self.straggler is not None and self.straggler[1] > _LATE:
            worker, factor = self.straggler
            lines.append(f"worker {worker} computes {factor:.1f} times as long as the others")
        lines.append(
            f"messages of worker {self.worker}: {self.pulling_s:.2f} s in pulls, "
            f"{self.pushing_s:.2f} s in pushes"
        )
        lines += [
            f"  {kind:<20} {calls:>7} {nbytes:>14,} B"
            for kind, (calls, nbytes) in sorted(self.nbytes.items())
        ]
        return "\n".join(lines)

    @property
    def _most(self) -> int:
        return max(self.staleness.values(), default=1)

    def draw(self, path: str) -> None:
        """Draws the histogram of staleness, the waits and the bytes to an .svg or .png file."""
        from pycoll.draw.staleness import draw_report

        draw_report(self, path)


def report_of(
    servers: Sequence[Mapping[str, Any]],
    worker: int,
    ledger: Ledger,
    pulling_s: float,
    pushing_s: float,
) -> Report:
    """Adds up what the servers answered, and what a worker's ledger has."""
    staleness: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    waited_s: Counter[int] = Counter()
    computing_s: dict[int, float] = {}
    nbytes = {name: (entry.calls, entry.nbytes) for (_, name), entry in ledger.entries.items()}
    clocks: dict[int, int] = {}
    for found in servers:
        staleness.update({int(key): times for key, times in found["staleness"].items()})
        dropped.update(found["dropped"])
        waited_s.update({int(key): seconds for key, seconds in found["waited_s"].items()})
        for key, seconds in found["computing_s"].items():
            computing_s[int(key)] = max(seconds, computing_s.get(int(key), 0.0))
        clocks.update({int(key): clock for key, clock in found["clocks"].items()})
        for name, (calls, size) in found["nbytes"].items():
            before = nbytes.get(name, (0, 0))
            nbytes[name] = (before[0] + calls, before[1] + size)
    gap = max((found["largest_gap"] for found in servers), default=0)
    return Report(
        staleness,
        dropped,
        nbytes,
        waited_s,
        computing_s,
        clocks,
        gap,
        worker,
        pulling_s,
        pushing_s,
    )


__all__ = ["Report", "report_of"]
