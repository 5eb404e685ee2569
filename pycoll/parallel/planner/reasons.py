"""What a plan says: the table of the best layouts, and why the other families lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pycoll.errors import UsageError
from pycoll.parallel.planner.layouts import Layout
from pycoll.parallel.planner.step import Prediction
from pycoll.topology import Topology

if TYPE_CHECKING:
    from pycoll.parallel.planner.layout_space import LayoutSpace


_FAR = 2.0  # times the winner's seconds: slower families are not simulated


def gigabytes(nbytes: float) -> str:
    """`12.3 GB`."""
    return f"{nbytes / 1e9:.3g} GB"


def table_of(
    best: list[Prediction],
    cluster: Topology,
    memory: int,
    why: list[str],
    tried: int,
    measured_s: Mapping[Layout, float],
) -> str:
    """Text with a line for each layout, and one for each family that lost."""
    measured = ("measured",) if measured_s else ()
    lines = [("layout", "ms/step", *measured, "memory", "bubble", "exposed", "of device")]
    device = cluster.device
    for of in best:
        peak = device.flops_per_s * of.layout.world if device else 0.0
        lines.append(
            (
                str(of.layout),
                f"{of.seconds * 1e3:,.4g}",
                *((_measured(measured_s.get(of.layout)),) if measured else ()),
                gigabytes(of.memory),
                f"{of.bubble_s / of.seconds:.0%}",
                f"{of.exposed_s / of.seconds:.0%}",
                f"{of.flops / of.seconds / peak:.0%}" if peak else "",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    name = cluster.name or "the cluster"
    head = f"{tried:,} layouts on {name}, {gigabytes(memory)} a rank:"
    return "\n".join([head, *text, *(f"  {line}" for line in why)])


def _measured(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.4g}"


def why_not(space: LayoutSpace, winner: Prediction) -> list[str]:
    """One line for each family of layouts that is not the winner's."""
    lines = []
    for family, members in space.each_family(_FAR * winner.seconds).items():
        if family != winner.layout.family:
            why = _reason(members, winner, space.limit) if members else _far(space, family, winner)
            lines.append(f"{family}: {why}")
    return lines


def _far(space: LayoutSpace, family: str, winner: Prediction) -> str:
    least_s, layout = space.least_s(family)
    return f"at least {least_s / winner.seconds:.2f} times as long, with {layout}"


def _reason(members: list[Prediction | UsageError], winner: Prediction, limit: int) -> str:
    runs = [of for of in members if isinstance(of, Prediction)]
    fit = [of for of in runs if of.memory <= limit]
    if fit:
        best = min(fit, key=lambda of: of.seconds)
        return f"{best.seconds / winner.seconds:.2f} times as long: {_loss(best, winner)}"
    if runs:
        least = min(runs, key=lambda of: of.memory)
        return f"needs {gigabytes(least.memory)} of {gigabytes(limit)}, with {least.layout}"
    return str(next(of for of in members if isinstance(of, UsageError)))


def _loss(of: Prediction, winner: Prediction) -> str:
    """What takes most of the additional time."""
    gains = {
        "of bubble": of.bubble_s - winner.bubble_s,
        "of computing, in smaller or repeated operators": of.compute_s - winner.compute_s,
    }
    for axes in {*of.parts_s, *winner.parts_s}:
        gains[f"of communication over {axes}"] = of.parts_s.get(axes, 0) - winner.parts_s.get(
            axes, 0
        )
    what = max(gains, key=lambda key: gains[key])
    return f"{gains[what] * 1e3:,.3g} ms {what}, with {of.layout}"


__all__ = ["gigabytes", "table_of", "why_not"]
