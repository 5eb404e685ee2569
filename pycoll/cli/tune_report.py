"""Output of `pycoll tune`: a table, a JSON object, a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pycoll.cli.common import console, new_table
from pycoll.cli.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from pycoll.tuning import Measured

CLOSE = 1.10  # a choice within this ratio of the best counts as the best


@dataclass(frozen=True, slots=True)
class Size:
    """Measurements of one size, and the choice of a communicator.

    Attributes:
        num_ranks: Number of ranks.
        measured: Times by candidate; includes AUTO when the choice was checked.
        chosen: ALGORITHM/PROTOCOL, or None when the choice was not checked.
        again: Second measurement of a slow choice: the best candidate of the first measurement,
            and the choice's ratio to it.
    """

    num_ranks: int
    measured: Measured
    chosen: str | None = None
    again: tuple[str, float] | None = None

    @property
    def group(self) -> tuple[str, int, str]:
        """Key of the table that contains this size."""
        return self.measured.collective, self.num_ranks, self.measured.arrays

    @property
    def time_s(self) -> float:
        """Time of pycoll's own choice, in seconds."""
        from pycoll.tuning import AUTO

        times = self.measured.times_s()
        return times[AUTO] if AUTO in times else times.get(self.chosen or "", math.nan)

    @property
    def first_ratio(self) -> float:
        """Ratio of the choice's time to the best time, in the first measurement."""
        return self.time_s / self.measured.times_s()[self.measured.best()]

    @property
    def ratio(self) -> float:
        """Ratio of the choice's time to the best time, in the last measurement."""
        return self.again[1] if self.again else self.first_ratio


def groups_of(shown: list[Size]) -> dict[tuple[str, int, str], list[Size]]:
    groups: dict[tuple[str, int, str], list[Size]] = {}
    for size in shown:
        groups.setdefault(size.group, []).append(size)
    return groups


def print_table(shown: list[Size], checked: bool) -> None:
    out = console()
    headers = ["size", "chosen", "time", "best measured", "time", "chosen / best"]
    if checked:
        headers.append("again")
    for (collective, n, arrays), sizes in groups_of(shown).items():
        table = new_table(*headers, title=f"{collective}, {n} ranks, {arrays} arrays, f32")
        for size in sizes:
            best = size.measured.best()
            cells = [
                format_nbytes(size.measured.nbytes),
                size.chosen or "",
                format_seconds(size.time_s),
                best,
                format_seconds(size.measured.times_s()[best]),
                f"{size.first_ratio:.2f}",
            ]
            if checked:
                again = f"{size.again[1]:.2f}" if size.again else ""
                cells.append(again + ("  <" if size.ratio > CLOSE else ""))
            table.add_row(*cells)
        out.print(table)
    if checked:
        for (collective, n, arrays), sizes in groups_of(shown).items():
            worst = max(sizes, key=lambda size: size.ratio)
            num_close = sum(size.ratio <= CLOSE for size in sizes)
            num_at_once = sum(size.first_ratio <= CLOSE for size in sizes)
            out.print(
                f"{collective}, {n} ranks, {arrays} arrays: worst choice {worst.ratio:.2f} x the "
                f"best, at {format_nbytes(worst.measured.nbytes)}; within 10 % at {num_close} of "
                f"{len(sizes)} sizes ({num_at_once} in the first measurement)"
            )


def print_json(shown: list[Size], checked: bool) -> None:
    import json

    from pycoll import _core

    rows = [
        {
            "collective": size.measured.collective,
            "num_ranks": size.num_ranks,
            "arrays": size.measured.arrays,
            "nbytes": size.measured.nbytes,
            "chosen": size.chosen,
            "ratio": size.ratio,
            "first_ratio": size.first_ratio,
            "measured_again": bool(size.again),
            "times_s": size.measured.times_s(),
        }
        for size in shown
    ]
    facts = {"machine": _core.machine_fingerprint(), "measured_again": checked, "rows": rows}
    typer.echo(json.dumps(facts, indent=2))


def picture_format_of(path: Path) -> str:
    from pycoll.draw.style import image_format, matplotlib_module

    matplotlib_module()
    return image_format(path, None, ("svg", "png"))


def picture(shown: list[Size], picture_format: str) -> bytes:
    from matplotlib.figure import Figure

    from pycoll.draw.style import render
    from pycoll.tuning import AUTO

    groups = groups_of(shown)
    num_columns = min(3, len(groups))
    num_rows = -(-len(groups) // num_columns)
    fig = Figure(figsize=(5.2 * num_columns, 3.9 * num_rows), layout="constrained")
    axes = list(fig.subplots(num_rows, num_columns, squeeze=False).flat)
    for ax, ((collective, n, arrays), sizes) in zip(axes, groups.items(), strict=False):
        choices = sorted({choice for size in sizes for choice in size.measured.rounds_s} - {AUTO})
        x = [size.measured.nbytes for size in sizes]
        times = [size.measured.times_s() for size in sizes]
        for choice in choices:
            y = [t[choice] * 1e6 if choice in t else math.nan for t in times]
            ax.plot(x, y, color="0.8", linewidth=0.8)
        best = [t[size.measured.best()] * 1e6 for t, size in zip(times, sizes, strict=True)]
        chosen = [size.time_s * 1e6 for size in sizes]
        ax.plot([], [], color="0.8", label="all candidates")
        ax.plot(x, chosen, "-", color="C0", linewidth=2, label="chosen")
        ax.plot(x, best, "o", color="C1", markersize=5, markerfacecolor="none", label="best")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(f"{collective}, {n} ranks, {arrays} arrays")
        ax.set_xlabel("message, bytes")
        ax.set_ylabel("time, us")
        ax.grid(True, which="major", alpha=0.3)
        ax.legend(fontsize="small")
    for ax in axes[len(groups) :]:
        ax.set_axis_off()
    return render(fig, picture_format)
