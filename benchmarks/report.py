"""What compare.py shows: tables, verdicts, the JSON record and the plot."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from floor import Floor
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one all_reduce by the slowest rank, over all samples of all rounds, in us."""

    median_us: float
    min_us: float
    p99_us: float
    num_samples: int
    calls_per_sample: int

    @staticmethod
    def of(samples_us: list[float], calls_per_sample: int) -> Timing:
        """Sums up samples; p99 is the smallest sample that 99 % of them do not exceed."""
        ordered = sorted(samples_us)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return Timing(statistics.median(ordered), ordered[0], p99, len(ordered), calls_per_sample)


Timings = dict[int, dict[str, Timing]]  # By message size in bytes, then library name.


@dataclass(frozen=True, slots=True)
class Goal:
    """A promise: at these sizes and ranks, the peer takes at least `factor` times pycoll's time."""

    what: str
    peer: str  # A library's name, or "best": the fastest peer at each size.
    factor: float
    sizes: range  # In bytes.
    ranks: tuple[int, ...]


GOALS = (
    Goal("4 B to 4 KiB: >= 0.8x the best peer", "best", 0.8, range(4, 4 * KIB + 1), (2, 4)),
    Goal(">= 16 MiB: >= 1x the best peer", "best", 1.0, range(16 * MIB, 1 << 40), (2,)),
    Goal("below 64 KiB: >= 20x gloo", "gloo", 20.0, range(4, 64 * KIB), (2, 4)),
)


def size_name(nbytes: int) -> str:
    """4, 1024, 65536 as 4 B, 1 KiB, 64 KiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def time_name(us: float) -> str:
    """A time in us, to three digits."""
    return f"{us:.3g}" if us < 100 else f"{us:,.0f}"


def best_peer(row: dict[str, Timing]) -> str | None:
    """The fastest library that is not pycoll."""
    peers = {name: timing.median_us for name, timing in row.items() if name != "pycoll"}
    return min(peers, key=peers.__getitem__) if peers else None


def ratio(row: dict[str, Timing], peer: str | None) -> float | None:
    """How many times pycoll's time the peer takes; above 1, pycoll is faster."""
    if peer in row and "pycoll" in row:
        return row[peer].median_us / row["pycoll"].median_us
    return None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def table(n: int, timings: Timings, libraries: list[str], floor: Floor | None) -> Table:
    """One row per size: medians in us, the best peer, and the ratios."""
    shown = [name for name in libraries if any(name in row for row in timings.values())]
    first = "pycoll" if "pycoll" in shown else "best peer"
    result = Table(title=f"all_reduce, f32 sum, {n} ranks: median us of the slowest rank")
    for heading in ("size", *shown, "best peer", "best/pycoll", "gloo/pycoll", "floor"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column(f"floor/{first}", justify="right", no_wrap=True)
    columns: list[list[float | None]] = []
    for nbytes, row in sorted(timings.items()):
        best = best_peer(row)
        floor_us = floor.all_reduce_us(n, nbytes) if floor else None
        reference = row.get("pycoll") or (row[best] if best else None)
        of_floor = floor_us / reference.median_us if floor_us and reference else None
        columns.append([ratio(row, best), ratio(row, "gloo"), of_floor])
        cells = [time_name(row[name].median_us) if name in row else "-" for name in shown]
        result.add_row(
            size_name(nbytes), *cells, best or "-", ratio_name(columns[-1][0]),
            ratio_name(columns[-1][1]), time_name(floor_us) if floor_us else "-",
            ratio_name(columns[-1][2]),
        )  # fmt: skip
    means = [ratio_name(geometric_mean(column)) for column in zip(*columns, strict=True)]
    result.add_section()
    blank = [""] * len(shown)
    result.add_row("geometric mean", *blank, "", means[0], means[1], "", means[2])
    return result


def ratio_name(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def verdicts(results: dict[int, Timings]) -> list[dict[str, Any]]:
    """Each goal at each number of ranks: whether it was met, and where it is nearest to failing."""
    found = []
    for goal in GOALS:
        for n in goal.ranks:
            ratios = {}
            for nbytes, row in results.get(n, {}).items():
                peer = best_peer(row) if goal.peer == "best" else goal.peer
                value = ratio(row, peer)
                if nbytes in goal.sizes and value is not None:
                    ratios[nbytes] = value
            entry: dict[str, Any] = {"goal": goal.what, "ranks": n, "met": None}
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                missed = [size_name(b) for b, r in sorted(ratios.items()) if r < goal.factor]
                entry |= {"met": not missed, "worst": ratios[worst], "worst_nbytes": worst}
                entry["missed_at"] = missed
            found.append(entry)
    return found


def verdict_line(entry: dict[str, Any]) -> str:
    """One verdict as a line of rich markup."""
    what = f"{entry['ranks']} ranks, speed at {entry['goal']}"
    if entry["met"] is None:
        return f"[yellow]not measured[/]  {what}"
    mark = "[green]met   [/]" if entry["met"] else "[red]missed[/]"
    lowest = f"lowest {ratio_name(entry['worst'])}x at {size_name(entry['worst_nbytes'])}"
    missed = f"; missed at {', '.join(entry['missed_at'])}" if entry["missed_at"] else ""
    return f"{mark}  {what} ({lowest}{missed})"


def machine() -> dict[str, Any]:
    """What the figures depend on; ask before any rank runs, or the load is one's own."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    return {
        "commit": commit.stdout.strip() or None,
        "uncommitted_changes": bool(changed.stdout.strip()),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1m": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def record(results: dict[int, Timings]) -> dict[str, object]:
    """All timings, keyed by ranks, size in bytes and library, for the JSON file."""
    return {
        str(n): {
            str(nbytes): {name: asdict(timing) for name, timing in row.items()}
            for nbytes, row in timings.items()
        }
        for n, timings in results.items()
    }


def plot(
    results: dict[int, Timings], libraries: list[str], floor: Floor | None, path: Path
) -> None:
    """Draws time against size, one panel per number of ranks; the format follows the file name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(6.5 * len(results), 5), sharey=True, squeeze=False
    )
    for panel, (n, timings) in zip(panels[0], results.items(), strict=True):
        sizes = sorted(timings)
        for name in libraries:
            points = [(b, timings[b][name].median_us) for b in sizes if name in timings[b]]
            if points:
                bold = name == "pycoll"
                panel.plot(
                    *zip(*points, strict=True),
                    label=name,
                    marker="o",
                    markersize=5 if bold else 3,
                    linewidth=2.5 if bold else 1.3,
                    color="black" if bold else None,
                    zorder=3 if bold else 2,
                )
        if floor:
            floors_us = [floor.all_reduce_us(n, b) for b in sizes]
            panel.plot(sizes, floors_us, label="floor", color="grey", linestyle="--")
        panel.set(xscale="log", yscale="log", title=f"{n} ranks", xlabel="message")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: size_name(int(nbytes))))
        panel.tick_params(axis="x", labelrotation=45)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("all_reduce, f32 sum: median us of the slowest rank")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
