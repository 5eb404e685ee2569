"""A graph of replicas as a picture: a panel for each round, and the spectral gap."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pycoll.draw.canvas import Canvas, Point
from pycoll.draw.style import INK, MARGIN, MUTED, PAPER, chunk_colors, render, tint

if TYPE_CHECKING:
    from pycoll.parallel.graph import Graph

_PANEL = 2.7  # width and height of a round, inches
_RADIUS = 0.95  # of the circle of ranks
_NODE = 0.17
_HEADER = 0.95
_MOST_LABELS = 24  # edges, beyond which weights are left out
_MOST_ROUNDS = 8


def draw_mixing(graph: Graph, target: Path) -> None:
    """Writes the picture of a graph to a file, .svg or .png."""
    rounds = graph.rounds[:_MOST_ROUNDS]
    canvas = Canvas(max(2 * MARGIN + _PANEL * len(rounds), 4.6), _HEADER + _PANEL)
    canvas.text(MARGIN, 0.32, f"{graph.name}, {graph.size} ranks", 15, INK, bold=True)
    canvas.text(MARGIN, 0.62, _caption(graph), 9.5, MUTED)
    for i, matrix in enumerate(rounds):
        left = MARGIN + _PANEL * i
        weights = {f"{weight:.2g}" for weight in matrix[_edges(matrix)]}
        notes = [f"round {i}"] if len(rounds) > 1 else []
        notes += [f"each edge weighs {min(weights)}"] if len(weights) == 1 else []
        canvas.text(left, _HEADER, ", ".join(notes), 9, MUTED)
        center = left + _PANEL / 2, _HEADER + _PANEL / 2
        _draw_round(canvas, matrix, center, labelled=len(weights) > 1)
    target.write_bytes(render(canvas.figure(), target.suffix.lstrip(".")))


def _caption(graph: Graph) -> str:
    num_rounds = len(graph.rounds)
    if graph.contraction == 0:
        return f"the mean is exact after {num_rounds} round{'s' if num_rounds > 1 else ''}"
    gap = f"spectral gap {graph.spectral_gap:.3f}: a round shrinks differences to "
    return f"{gap}{graph.contraction:.3f} or less"


def _edges(matrix: np.ndarray) -> np.ndarray:
    """Which elements are weights of other ranks, [n, n] bool."""
    return (matrix > 1e-12) & ~np.eye(len(matrix), dtype=bool)


def _draw_round(canvas: Canvas, matrix: np.ndarray, center: Point, *, labelled: bool) -> None:
    n = len(matrix)
    turns = [2 * math.pi * rank / n - math.pi / 2 for rank in range(n)]
    at = [
        (center[0] + _RADIUS * math.cos(turn), center[1] + _RADIUS * math.sin(turn))
        for turn in turns
    ]
    color = chunk_colors(2)[0]
    edges = [(j, i) for i, j in np.argwhere(_edges(matrix)).tolist()]
    for source, target in edges:
        both = matrix[source, target] > 1e-12
        if both and source > target:
            continue  # one line for both ways
        _draw_edge(canvas, at[source], at[target], color, is_arrow=not both)
        if labelled and len(edges) <= _MOST_LABELS:
            x, y = (0.6 * a + 0.4 * b for a, b in zip(at[source], at[target], strict=True))
            canvas.box(x - 0.15, y - 0.07, 0.3, 0.14, fill=PAPER, z=4)
            canvas.text(x, y, f"{matrix[target, source]:.2g}", 7.5, INK, align="center")
    for rank, place in enumerate(at):
        canvas.circle(place, _NODE, z=5, fill=tint(color), edge=color, line_width=1.2)
        canvas.text(*place, str(rank), 9, INK, bold=True, align="center")


def _draw_edge(canvas: Canvas, a: Point, b: Point, color: str, *, is_arrow: bool) -> None:
    length = math.dist(a, b)
    along = ((b[0] - a[0]) / length, (b[1] - a[1]) / length)
    start = (a[0] + along[0] * _NODE, a[1] + along[1] * _NODE)
    end = (b[0] - along[0] * _NODE, b[1] - along[1] * _NODE)
    canvas.line(start, end, color, 1.1, z=2, alpha=0.8)
    if is_arrow:
        back = (end[0] - 0.13 * along[0], end[1] - 0.13 * along[1])
        wide = (-0.055 * along[1], 0.055 * along[0])
        corners = [end, (back[0] + wide[0], back[1] + wide[1])]
        corners.append((back[0] - wide[0], back[1] - wide[1]))
        canvas.polygon(corners, z=3, fill=color)


__all__ = ["draw_mixing"]
