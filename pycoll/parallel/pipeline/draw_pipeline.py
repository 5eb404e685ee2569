"""Pictures of schedules, ranks downward and time to the right, as in the papers: SVG, PNG, text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycoll.draw.canvas import Canvas
from pycoll.draw.style import (
    GRID,
    INK,
    MARGIN,
    MUTED,
    PAPER,
    SHADE,
    deliver,
    deliver_figure,
    image_format,
    ink_on,
    ticks,
)
from pycoll.parallel.pipeline.schedules.actions import Costs, Kind, Schedule
from pycoll.parallel.pipeline.schedules.simulate_pipeline import Event, Simulation, simulate

STYLES = ("plain", "gpipe", "pipedream")

# Paul Tol's "bright" and "light" schemes, which are distinct for any colour vision.
_COLORS = {Kind.F: "#4477aa", Kind.B: "#228833", Kind.I: "#66b2a4", Kind.W: "#bbaa33"}
_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward, inputs",
    Kind.W: "backward, weights",
}
_ROW, _PITCH = 0.34, 0.46  # inches
_LEFT, _TOP, _BOTTOM = 1.25, 1.05, 0.85
_RIGHT = 1.25  # for the note behind each rank
_MAX_LABELED = 4000


def draw_pipeline(
    schedule: Schedule,
    path: str | Path | None = None,
    *,
    costs: Costs | None = None,
    played: Simulation | None = None,
    style: str | None = None,
    title: str | None = None,
    until: float | None = None,
    format: str | None = None,
) -> str | bytes | None:
    """Draws the actions of each rank over time.

    Args:
        schedule: The schedule to draw.
        path: The file to write; None: the picture is returned.
        costs: Costs for the simulation. Default: F 1, B 2.
        played: Simulation or measurement to draw; None: `schedule` is simulated.
        style: "gpipe": the first rank at the bottom, Fk,m in the boxes, bubble and update;
            "pipedream": workers from 1, start-up and steady state; "plain". Default: by schedule.
        title: Title; default: for example `1f1b, 4 ranks, 8 microbatches`.
        until: Time at which the picture ends. Default: the end of the last action.
        format: "svg", "png" or "text". Default: the suffix of the path; text without a path.

    Returns:
        None if a file was written; else str for svg and text, bytes for png.

    Raises:
        UsageError: The format is unknown, or matplotlib is not installed.

    Cost: about a second per 2,000 actions.
    """
    chosen = image_format(path, format, ("svg", "png", "text"))
    played = played or simulate(schedule, costs)
    if chosen == "text":
        return deliver(draw_text(schedule, played), path)
    style = style or (schedule.name if schedule.name in STYLES else "plain")
    return deliver_figure(_Drawing(schedule, played, style, title, until).draw(), chosen, path)


def summary(schedule: Schedule, played: Simulation) -> str:
    """Formats bubble and memory as one line."""
    live = " ".join(map(str, played.peak_live))
    chunks = "" if schedule.stages_per_rank == 1 else f" chunks of 1/{schedule.stages_per_rank}"
    steady = ""
    if schedule.updates and schedule.num_microbatches > schedule.num_ranks:
        idle = played.idle_share_between(*played.steady)
        steady = f"idle {100 * idle:.1f} % of the steady state; start and end with it: "
    return (
        f"{steady}bubble {100 * played.bubble:.1f} % of the work, {100 * played.idle_share:.1f} % "
        f"of all time; live activations by rank: {live}{chunks}"
    )


_MAX_TEXT = 2000  # characters of a line of draw_text


class _Drawing:
    def __init__(
        self,
        schedule: Schedule,
        played: Simulation,
        style: str,
        title: str | None,
        until: float | None,
    ) -> None:
        self._schedule = schedule
        self._played = played
        self._style = style
        shortest = min((e.end - e.start for e in played.events if e.end > e.start), default=1.0)
        self._end = min(until or played.time, played.time)
        plot = max(7.0, min(16.0, 0.36 * self._end / shortest))
        self._scale = plot / self._end if self._end else 1.0
        self._plot = plot
        p, m = schedule.num_ranks, schedule.num_microbatches
        stages = f", {schedule.stages_per_rank} stages each" * (schedule.stages_per_rank > 1)
        self._title = title or f"{schedule.name}, {p} ranks{stages}, {m} microbatches"
        self._bottom = _TOP + p * _PITCH
        self._has_updates = style == "gpipe"
        right = _RIGHT + 0.75 * self._has_updates
        self._canvas = Canvas(_LEFT + plot + right, self._bottom + _BOTTOM)

    def draw(self) -> Any:
        canvas = self._canvas
        canvas.text(MARGIN, 0.32, self._title, 15, INK, bold=True)
        canvas.text(MARGIN, 0.64, summary(self._schedule, self._played), 9.5, MUTED)
        for rank in range(self._schedule.num_ranks):
            self._row(rank)
        if self._style == "pipedream":
            self._states()
        labeled = len(self._played.events) <= _MAX_LABELED
        for event in self._played.events:
            self._event(event, labeled)
        self._axis()
        self._legend()
        return canvas.figure()

    def _y(self, rank: int) -> float:
        row = self._schedule.num_ranks - 1 - rank if self._style == "gpipe" else rank
        return _TOP + row * _PITCH

    def _x(self, time: float) -> float:
        return _LEFT + time * self._scale

    def _row(self, rank: int) -> None:
        canvas, y, middle = self._canvas, self._y(rank), self._y(rank) + _ROW / 2
        names = {"gpipe": f"device {rank}", "pipedream": f"worker {rank + 1}"}
        canvas.text(MARGIN, middle, names.get(self._style, f"rank {rank}"), 10, INK, bold=True)
        canvas.box(_LEFT, y, self._plot, _ROW, fill=SHADE, edge=GRID, line_width=0.5, z=0)
        x = _LEFT + self._plot + 0.1
        if self._has_updates:
            canvas.box(x - 0.06, y, 0.66, _ROW, fill="#ccbb44", edge=PAPER, line_width=0.6, z=3)
            canvas.text(x + 0.27, middle, "update", 8, INK, align="center")
            self._bubble(rank)
            x += 0.75
        canvas.text(x, middle, f"live {self._played.peak_live[rank]}", 8.5, MUTED)

    def _bubble(self, rank: int) -> None:
        """Labels the longest gap of a rank, as in GPipe's picture."""
        events = [e for e in self._played.events if e.rank == rank]
        gaps = [
            (after.start - before.end, before.end)
            for before, after in zip(events, events[1:], strict=False)
        ]
        length, start = max(gaps, default=(0.0, 0.0))
        if length * self._scale > 0.6:
            x = self._x(start + length / 2)
            self._canvas.text(x, self._y(rank) + _ROW / 2, "bubble", 8.5, MUTED, align="center")

    def _event(self, event: Event, labeled: bool) -> None:
        action = event.action
        if action.kind is Kind.U:
            return  # takes no time; the legend mentions updates
        if event.start >= self._end - 1e-9:
            return
        x, width = self._x(event.start), (min(event.end, self._end) - event.start) * self._scale
        y = self._y(event.rank)
        chunk = self._schedule.stages_of(event.rank).index(action.stage)
        fill = _lighter(_COLORS[action.kind], 0.34 * min(chunk, 2))
        self._canvas.box(x, y, width, _ROW, fill=fill, edge=PAPER, line_width=0.6, z=3)
        label = str(action.microbatch + (self._style == "pipedream"))
        if self._style == "gpipe":
            letter = "F" if action.kind is Kind.F else "B"
            label = f"{letter}{action.stage},{action.microbatch}"
        size = 8.0 if width > 0.075 * len(label) + 0.05 else 5.5
        if labeled and width > 0.05 * len(label):
            middle = x + width / 2, y + _ROW / 2
            self._canvas.text(*middle, label, size, ink_on(fill), bold=True, align="center")

    def _states(self) -> None:
        """Marks the first backward of stage 0: start-up ends and the steady state begins."""
        first = [e for e in self._played.events if e.action == (0, Kind.B, 0)]
        if not first:
            return
        x, y = self._x(first[0].start), _TOP - 0.14
        self._canvas.line((x, y - 0.08), (x, self._bottom), INK, 1.0, z=2, dashed=True)
        self._canvas.text(x - 0.08, y, "start-up", 8.5, INK, align="right")
        self._canvas.text(x + 0.08, y, "steady state", 8.5, INK)

    def _axis(self) -> None:
        y = self._bottom + 0.08
        for tick in ticks(self._end, 12, whole=True):
            x = self._x(tick)
            self._canvas.line((x, _TOP), (x, y - 0.05), GRID, 0.5, z=1)
            self._canvas.text(x, y + 0.05, f"{tick:g}", 8, MUTED, align="center")
        self._canvas.text(_LEFT + self._plot + 0.25, y + 0.05, "time", 8.5, MUTED)

    def _legend(self) -> None:
        x, y = _LEFT, self._bottom + 0.48
        kinds = {event.action.kind for event in self._played.events}
        for kind in (kind for kind in _COLORS if kind in kinds):
            self._canvas.box(x, y - 0.08, 0.22, 0.16, fill=_COLORS[kind], z=3)
            self._canvas.text(x + 0.3, y, _NAMES[kind], 8.5, MUTED)
            x += 0.55 + 0.075 * len(_NAMES[kind])
        notes = []
        if self._schedule.stages_per_rank > 1:
            notes.append("lighter: a rank's later stages")
        if Kind.U in kinds:
            few = self._schedule.per_update
            last = "each backward" if few == 1 else f"every {few} backwards"
            notes.append(f"weights are updated at the end of {last}")
        notes.append("numbers are microbatches")
        self._canvas.text(x, y, "; ".join(notes), 8.5, MUTED)


def _lighter(color: str, part: float) -> str:
    """Mixes a colour with a part of white."""
    values = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(value + part * (255 - value)):02x}" for value in values)


def draw_text(schedule: Schedule, played: Simulation) -> str:
    """Draws in characters: one column for each unit of the shortest forward or backward.

    Lines have at most _MAX_TEXT characters, since measured times may differ by orders of magnitude.
    """
    actions = (e for e in played.events if e.end > e.start and e.action.kind is not Kind.U)
    width = len(str(schedule.num_microbatches - 1)) + 2
    unit = min((e.end - e.start for e in actions), default=1.0)
    unit = max(unit, played.time * width / _MAX_TEXT)
    columns = max(1, round(played.time / unit))
    lines = []
    for rank in range(schedule.num_ranks):
        row = [" " * width] * columns
        for event in played.events:
            if event.rank == rank and event.action.kind is not Kind.U:
                _write(row, event, unit, width, schedule.stages_of(rank))
        lines.append(f"rank {rank:<2} |{''.join(row)}| live {played.peak_live[rank]}")
    return "\n".join(lines) + "\n" + summary(schedule, played) + "\n"


def _write(row: list[str], event: Event, unit: float, width: int, stages: Sequence[int]) -> None:
    start, end = round(event.start / unit), round(event.end / unit)
    letter = event.action.kind.value
    if stages.index(event.action.stage) % 2:
        letter = letter.lower()  # odd stages of a rank
    label = f"{letter}{event.action.microbatch}"
    cells = f"{label:-<{width * (end - start) - 1}} " if end - start > 1 else f"{label:<{width}}"
    for i in range(start, min(end, len(row))):
        row[i] = cells[(i - start) * width : (i - start + 1) * width]


__all__ = ["STYLES", "draw_pipeline", "draw_text", "summary"]
