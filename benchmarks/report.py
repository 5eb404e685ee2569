"""What a comparison says: names, ratios, verdicts, and the tables of the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from record import Case, Row, Rows, Timing
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20

# In the order of the columns. The first two are this library, the rest its peers.
TITLES = {
    "pycoll": "pycoll",
    "pycoll_new": "pycoll, new arrays",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "impi": "Intel MPI",
    "gloo": "gloo",
    "deepspeed": "DeepSpeed",
}
OURS = ("pycoll", "pycoll_new")
PEERS = tuple(name for name in TITLES if name not in OURS)
MPIS = ("openmpi", "mpich", "impi")
MOVERS = ("reduce_scatter", "all_gather", "all_to_all", "broadcast")


def size_name(nbytes: int) -> str:
    """4, 1024, 65536 as 4 B, 1 KiB, 64 KiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def time_name(us: float) -> str:
    """A time in us, to three digits."""
    return f"{us:.3g}" if us < 100 else f"{us:,.0f}"


def ratio_name(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def best_peer(timings: dict[str, Timing], peers: Iterable[str] = PEERS) -> str | None:
    """The fastest of the peers at one size."""
    medians = {name: timings[name].median_us for name in peers if name in timings}
    return min(medians, key=medians.__getitem__) if medians else None


def ratio(row: Row, ours: str, peers: Iterable[str] = PEERS) -> float | None:
    """How many times our time the fastest peer takes; above 1, we are faster."""
    best = best_peer(row.timings, peers)
    if best is None or ours not in row.timings:
        return None
    return row.timings[best].median_us / row.timings[ours].median_us


def of_floor(row: Row, ours: str) -> float | None:
    """Our speed as a share of what the machine can do."""
    if row.floor_us is None or ours not in row.timings:
        return None
    return row.floor_us / row.timings[ours].median_us


def geometric_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


@dataclass(frozen=True, slots=True)
class Summary:
    """Ratios of one case: by size, their geometric mean, and where they are lowest."""

    ratios: dict[int, float]

    @staticmethod
    def of(rows: Rows, ours: str, peers: Iterable[str] = PEERS) -> Summary:
        found = {nbytes: ratio(row, ours, peers) for nbytes, row in sorted(rows.items())}
        return Summary({nbytes: value for nbytes, value in found.items() if value is not None})

    @property
    def mean(self) -> float | None:
        return geometric_mean(self.ratios.values())

    @property
    def worst_nbytes(self) -> int:
        return min(self.ratios, key=self.ratios.__getitem__)

    def line(self) -> str:
        """The summary in words."""
        worst = self.worst_nbytes
        return (
            f"geometric mean {ratio_name(self.mean)}, "
            f"lowest {ratio_name(self.ratios[worst])} at {size_name(worst)}"
        )


@dataclass(frozen=True, slots=True)
class Goal:
    """A promise about the ratio to the best peer, or about the share of the floor.

    Attributes:
        what: In words.
        collectives, ranks, dtypes: Where it holds.
        least: The ratio, at every size from `from_nbytes` to `to_nbytes`; or their mean.
        peers: Against whom; empty: the floor.
        mean: Whether `least` is for the geometric mean.
    """

    what: str
    least: float
    collectives: tuple[str, ...] = ("all_reduce",)
    dtypes: tuple[str, ...] = ("f32", "bf16")
    ranks: tuple[int, ...] = (2,)
    from_nbytes: int = 1
    to_nbytes: int = 1 << 62
    peers: tuple[str, ...] = PEERS
    mean: bool = False
    sizes: tuple[int, ...] = ()  # only these

    def holds_for(self, case: Case) -> bool:
        return (
            case.collective in self.collectives
            and case.dtype in self.dtypes
            and case.n in self.ranks
        )


GOALS = (
    Goal("never slower than the best peer", 1.0),
    Goal("geometric mean of best peer / pycoll", 1.5, mean=True),
    Goal("from 16 MiB, best peer / pycoll", 2.5, from_nbytes=16 * MIB),
    Goal("never slower than the best peer", 1.0, ranks=(4, 8), to_nbytes=64 * MIB),
    Goal("never slower than the best MPI", 1.0, MOVERS, ("f32",), peers=MPIS),
    Goal("geometric mean of best MPI / pycoll", 1.3, MOVERS, ("f32",), peers=MPIS, mean=True),
    Goal("share of the floor", 0.6, peers=(), dtypes=("f32",), sizes=(MIB, 64 * MIB)),
)


def verdicts(cases: dict[Case, Rows]) -> list[dict[str, Any]]:
    """Each goal in each case, for each of our series: met or not, and where it is nearest to it."""
    return [
        entry
        for case, rows in sorted(cases.items())
        for goal in GOALS
        if goal.holds_for(case)
        for ours in OURS
        for entry in judged(goal, case, rows, ours)
    ]


def judged(goal: Goal, case: Case, rows: Rows, ours: str) -> Iterator[dict[str, Any]]:
    ratios = {}
    for nbytes, row in sorted(rows.items()):
        value = ratio(row, ours, goal.peers) if goal.peers else of_floor(row, ours)
        wanted = goal.from_nbytes <= nbytes <= goal.to_nbytes
        if value is not None and wanted and (not goal.sizes or nbytes in goal.sizes):
            ratios[nbytes] = value
    if not ratios:
        return
    summary = Summary(ratios)
    worst = summary.worst_nbytes
    entry: dict[str, Any] = {"case": str(case), "series": ours, "goal": goal.what}
    entry["least"] = goal.least
    entry |= {"mean": summary.mean, "worst": ratios[worst], "worst_nbytes": worst}
    entry["missed_at"] = [nbytes for nbytes, value in ratios.items() if value < goal.least]
    entry["met"] = summary.mean >= goal.least if goal.mean else not entry["missed_at"]
    entry["of_mean"] = goal.mean
    yield entry


def verdict_line(entry: dict[str, Any]) -> str:
    """One verdict as a line of rich markup."""
    mark = "[green]met   [/]" if entry["met"] else "[red]missed[/]"
    found = f"lowest {ratio_name(entry['worst'])} at {size_name(entry['worst_nbytes'])}"
    if entry["of_mean"]:
        found = f"{ratio_name(entry['mean'])}; {found}"
    elif entry["missed_at"]:
        found += f"; missed at {', '.join(map(size_name, entry['missed_at']))}"
    collective, dtype, n = entry["case"].split()
    what = f"{collective} {dtype}, {n} ranks, {TITLES[entry['series']]}"
    return f"{mark}  {what}: {entry['goal']} >= {entry['least']:g} ({found})"


def shown_libraries(rows: Rows) -> list[str]:
    """Those that took part in a case, in the order of the columns."""
    return [name for name in TITLES if any(name in row.timings for row in rows.values())]


def table(case: Case, rows: Rows) -> Table:
    """One line per size: medians in us, ratios, share of the floor."""
    shown = shown_libraries(rows)
    ours = [name for name in OURS if name in shown]
    title = f"{case.collective}, {case.dtype}, {case.n} ranks: median us of the slowest rank"
    result = Table(title=title)
    headings = ["size", *(TITLES[name] for name in shown), "best peer"]
    headings += [f"best / {TITLES[name]}" for name in ours]
    headings += ["floor", *(f"floor / {TITLES[name]}" for name in ours)]
    for heading in headings:
        result.add_column(heading, justify="right", overflow="fold")
    for nbytes, row in sorted(rows.items()):
        times = [time_name(row.timings[k].median_us) if k in row.timings else "-" for k in shown]
        result.add_row(
            size_name(nbytes),
            *times,
            TITLES.get(best_peer(row.timings) or "", "-"),
            *(ratio_name(ratio(row, name)) for name in ours),
            time_name(row.floor_us) if row.floor_us else "-",
            *(ratio_name(of_floor(row, name)) for name in ours),
        )
    result.add_section()
    means = [ratio_name(Summary.of(rows, name).mean) for name in ours]
    shares = [ratio_name(geometric_mean(of_floor(r, k) for r in rows.values())) for k in ours]
    result.add_row("geometric mean", *[""] * (len(shown) + 1), *means, "", *shares)
    return result
