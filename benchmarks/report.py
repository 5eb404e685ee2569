"""The result of a comparison: names, ratios, verdicts and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pycoll.bench.case import Case
from pycoll.bench.record import Record
from pycoll.bench.timing import Timing
from pycoll.cli.units import format_nbytes

MIB = 1 << 20

# In the order of the columns. The first three are this library, the rest its peers.
TITLES = {
    "pycoll": "pycoll",
    "pycoll_registered": "pycoll, registered",
    "pycoll_new": "pycoll, new arrays",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "impi": "Intel MPI",
    "gloo": "gloo",
    "deepspeed": "DeepSpeed",
}
OURS = ("pycoll", "pycoll_registered", "pycoll_new")
PEERS = tuple(name for name in TITLES if name not in OURS)
MPIS = ("openmpi", "mpich", "impi")
MOVERS = ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")


def time_name(us: float) -> str:
    """A time in us, to three digits."""
    return f"{us:.3g}" if us < 100 else f"{us:,.0f}"


def ratio_name(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """The messages that one table shows, which differ in their size."""

    collective: str
    dtype: str
    n: int
    rewritten: bool = False

    @staticmethod
    def of(case: Case) -> Group:
        return Group(case.collective, case.dtype, case.num_ranks, case.rewritten)

    def __str__(self) -> str:
        rewritten = ", rewritten arrays" if self.rewritten else ""
        return f"{self.collective}, {self.dtype}, {self.n} ranks{rewritten}"


@dataclass(frozen=True, slots=True)
class Line:
    """One size of a table: the timings of every library, and of the floors that were measured."""

    timings: dict[str, Timing]

    def floor_us(self, name: str = "floor") -> float | None:
        """Median of a floor in us; "floor_new" is that of new arrays."""
        return us(self.timings[name]) if name in self.timings else None


Lines = dict[int, Line]  # by size of the message, bytes


def grouped(record: Record) -> dict[Group, Lines]:
    """The tables of a record."""
    groups: dict[Group, Lines] = {}
    for rows in record.messages():
        case = rows[0].case
        line = Line({row.case.library: row.timing for row in rows})
        groups.setdefault(Group.of(case), {})[case.nbytes] = line
    return groups


def us(timing: Timing) -> float:
    """Its median in us, without the digits that are noise of the conversion."""
    return round(timing.median_s * 1e6, 8)


def best_peer(timings: dict[str, Timing], peers: Iterable[str] = PEERS) -> str | None:
    """The fastest of the peers at one size."""
    medians = {name: timings[name].median_s for name in peers if name in timings}
    return min(medians, key=medians.__getitem__) if medians else None


def ratio(line: Line, ours: str, peers: Iterable[str] = PEERS) -> float | None:
    """How many times our time the fastest peer takes; above 1, we are faster."""
    best = best_peer(line.timings, peers)
    if best is None or ours not in line.timings:
        return None
    return line.timings[best].median_s / line.timings[ours].median_s


def of_floor(line: Line, ours: str) -> float | None:
    """Our speed as a share of what the machine can do."""
    floor_us = line.floor_us("floor_new" if ours == "pycoll_new" else "floor")
    if floor_us is None or ours not in line.timings:
        return None
    return floor_us / us(line.timings[ours])


@dataclass(frozen=True, slots=True)
class Summary:
    """Ratios of one case: by size, their geometric mean, and where they are lowest."""

    ratios: dict[int, float]

    @staticmethod
    def of(lines: Lines, ours: str, peers: Iterable[str] = PEERS) -> Summary:
        found = {nbytes: ratio(line, ours, peers) for nbytes, line in sorted(lines.items())}
        return Summary({nbytes: value for nbytes, value in found.items() if value is not None})

    @property
    def mean(self) -> float | None:
        return statistics.geometric_mean(self.ratios.values()) if self.ratios else None

    @property
    def worst_nbytes(self) -> int:
        return min(self.ratios, key=self.ratios.__getitem__)

    def line(self) -> str:
        """The summary in words."""
        worst = self.worst_nbytes
        return (
            f"geometric mean {ratio_name(self.mean)}, "
            f"lowest {ratio_name(self.ratios[worst])} at {format_nbytes(worst)}"
        )


@dataclass(frozen=True, slots=True)
class Goal:
    """A promise about the ratio to the best peer, or about the share of the floor.

    Attributes:
        what: In words.
        collectives, ranks, dtypes: The tables that it is for.
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

    def holds_for(self, group: Group) -> bool:
        return (
            group.collective in self.collectives
            and group.dtype in self.dtypes
            and group.n in self.ranks
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


def verdicts(groups: dict[Group, Lines]) -> list[dict[str, Any]]:
    """Each goal in each table, for each of our series: met or not, and the size nearest to it."""
    return [
        entry
        for group, lines in sorted(groups.items())
        for goal in GOALS
        if goal.holds_for(group)
        for ours in OURS
        for entry in judged(goal, group, lines, ours)
    ]


def judged(goal: Goal, group: Group, lines: Lines, ours: str) -> Iterator[dict[str, Any]]:
    ratios = {}
    for nbytes, line in sorted(lines.items()):
        value = ratio(line, ours, goal.peers) if goal.peers else of_floor(line, ours)
        wanted = goal.from_nbytes <= nbytes <= goal.to_nbytes
        if value is not None and wanted and (not goal.sizes or nbytes in goal.sizes):
            ratios[nbytes] = value
    if not ratios:
        return
    summary = Summary(ratios)
    worst = summary.worst_nbytes
    entry: dict[str, Any] = {"case": str(group), "series": ours, "goal": goal.what}
    entry["least"] = goal.least
    entry |= {"mean": summary.mean, "worst": ratios[worst], "worst_nbytes": worst}
    entry["missed_at"] = [nbytes for nbytes, value in ratios.items() if value < goal.least]
    entry["met"] = summary.mean >= goal.least if goal.mean else not entry["missed_at"]
    entry["of_mean"] = goal.mean
    yield entry


def verdict_line(entry: dict[str, Any]) -> str:
    """One verdict as a line of rich markup."""
    mark = "[green]met   [/]" if entry["met"] else "[red]missed[/]"
    found = f"lowest {ratio_name(entry['worst'])} at {format_nbytes(entry['worst_nbytes'])}"
    if entry["of_mean"]:
        found = f"{ratio_name(entry['mean'])}; {found}"
    elif entry["missed_at"]:
        found += f"; missed at {', '.join(map(format_nbytes, entry['missed_at']))}"
    what = f"{entry['case']}, {TITLES[entry['series']]}"
    return f"{mark}  {what}: {entry['goal']} >= {entry['least']:g} ({found})"


def shown_libraries(lines: Lines) -> list[str]:
    """The libraries that took part in a table, in the order of the columns."""
    return [name for name in TITLES if any(name in line.timings for line in lines.values())]


def ordered(groups: Iterable[Group]) -> list[Group]:
    """all_reduce first, f32 before bf16, rewritten arrays last, else as they come in the record."""
    return sorted(
        groups,
        key=lambda group: (group.collective != "all_reduce", group.dtype != "f32", group.rewritten),
    )


def p99_name(line: Line, name: str | None) -> str:
    """The 99th percentile in us."""
    p99_s = line.timings[name].p99_s if name in line.timings else None
    return "-" if p99_s is None else time_name(p99_s * 1e6)


def markdown(group: Group, lines: Lines, cores: int) -> str:
    """Median us of the slowest rank by size, two p99, our ratios, shares of the floor; Markdown."""
    shown = shown_libraries(lines)
    ours = [name for name in OURS if name in shown]
    ranks = f"{group.n} ranks" + f" on {cores} cores" * (group.n > cores)
    head = [ranks, *(TITLES[name] for name in shown), "p99: pycoll, best peer"]
    bounded = ["pycoll"]
    if any(of_floor(line, "pycoll_new") is not None for line in lines.values()):
        bounded.append("pycoll_new")
    head += [f"best / {TITLES[name]}" for name in ours]
    head += [f"floor / {TITLES[name]}" for name in bounded]
    out = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for nbytes, line in sorted(lines.items()):
        cells = [format_nbytes(nbytes)]
        cells += [time_name(us(line.timings[k])) if k in line.timings else "-" for k in shown]
        cells.append(f"{p99_name(line, 'pycoll')}, {p99_name(line, best_peer(line.timings))}")
        cells += [ratio_name(ratio(line, name)) for name in ours]
        cells += [ratio_name(of_floor(line, name)) for name in bounded]
        out.append("| " + " | ".join(cells) + " |")
    for name in OURS:
        summary = Summary.of(lines, name)
        if summary.ratios:
            out += ["", f"Best peer / {TITLES[name]}: {summary.line()}."]
        of_mpi = Summary.of(lines, name, MPIS)
        if group.collective in MOVERS and of_mpi.ratios != summary.ratios and of_mpi.ratios:
            out += ["", f"Best MPI / {TITLES[name]}: {of_mpi.line()}."]
    return "\n".join(out)
