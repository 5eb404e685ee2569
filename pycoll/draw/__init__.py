"""Pictures of schedules and of simulations: SVG, PNG and text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycoll.draw.picture import make_picture
from pycoll.draw.style import deliver, deliver_figure, image_format
from pycoll.draw.text import draw_text

__all__ = ["draw_cluster", "draw_network", "draw_schedule", "draw_simulation"]


def draw_schedule(
    schedule: Any,
    path: str | Path | None = None,
    *,
    title: str | None = None,
    format: str | None = None,
) -> str | bytes | None:
    """Draws a space-time diagram: ranks across, rounds downward, chunks by colour.

    Args:
        schedule: a pycoll.schedule.Schedule.
        path: the file to write; None returns the picture instead.
        title: replaces `ring all_reduce, 8 ranks`.
        format: `svg`, `png`, `text` (box characters) or `ascii`. Default: by the ending of the
            path; `text` without a path.

    Returns:
        None when a file was written; else str for svg, text and ascii, bytes for png.

    Raises:
        UsageError: an unknown format, or a figure is wanted and matplotlib is not installed.

    Cost: a tenth of a second to a few seconds, growing with ranks times chunks times rounds.
    """
    chosen = image_format(path, format, ("svg", "png", "text", "ascii"))
    picture = make_picture(schedule, title)
    if chosen in ("text", "ascii"):
        return deliver(draw_text(picture, ascii_only=chosen == "ascii"), path)
    from pycoll.draw.figure import draw_figure

    return deliver_figure(draw_figure(picture), chosen, path)


def draw_simulation(
    simulation: Any,
    path: str | Path | None = None,
    *,
    title: str | None = None,
    format: str | None = None,
) -> str | bytes | None:
    """Draws when each rank sends, receives and reduces: a timeline of lanes.

    Args:
        simulation: a pycoll.schedule.Simulation.
        path: the file to write; None returns the picture instead.
        title: replaces `simulated time: 12.3 us`.
        format: `svg` or `png`. Default: by the ending of the path; `svg` without a path.

    Returns:
        None when a file was written; else str for svg, bytes for png.

    Raises:
        UsageError: an unknown format, or matplotlib is not installed.

    Cost: about a second per 10,000 events.
    """
    chosen = image_format(path, format or ("svg" if path is None else None), ("svg", "png"))
    from pycoll.draw.timeline import draw_timeline

    return deliver_figure(draw_timeline(simulation, title), chosen, path)


def draw_network(
    results: Sequence[Any],
    path: str | Path | None = None,
    *,
    title: str | None = None,
    format: str | None = None,
) -> str | bytes | None:
    """Draws simulations on a cluster: time and busbw against size, and how busy links are.

    Args:
        results: pycoll.topology.NetworkSimulations of one cluster. Those of several sizes become
            curves; those that have a timeline get a panel of their own each.
        path: the file to write; None returns the picture instead.
        title: above the picture.
        format: `svg` or `png`. Default: by the ending of the path; `svg` without a path.

    Returns:
        None when a file was written; else str for svg, bytes for png.

    Raises:
        UsageError: an unknown format, nothing to draw, or matplotlib is not installed.

    Cost: about a second.
    """
    chosen = image_format(path, format or ("svg" if path is None else None), ("svg", "png"))
    from pycoll.draw.network import draw_results

    return deliver_figure(draw_results(results, title), chosen, path)


def draw_cluster(
    facts: dict[str, Any],
    path: str | Path | None = None,
    *,
    title: str = "Messages between hosts",
    format: str | None = None,
) -> str | bytes | None:
    """Draws what messages between every two hosts take, and within each.

    Args:
        facts: What `pycoll info --cluster --json` prints.
        path: the file to write; None returns the picture instead.
        title: above the picture.
        format: `svg` or `png`. Default: by the ending of the path; `svg` without a path.

    Returns:
        None when a file was written; else str for svg, bytes for png.

    Raises:
        UsageError: an unknown format, or matplotlib is not installed.

    Cost: a tenth of a second.
    """
    chosen = image_format(path, format or ("svg" if path is None else None), ("svg", "png"))
    from pycoll.draw.cluster import draw_cluster as draw

    return deliver_figure(draw(facts, title), chosen, path)
