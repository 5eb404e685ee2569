"""The course of a collective in simulated time; see csrc/schedule/simulate.h."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Event", "Simulation"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes time in a simulation.

    Args:
        kind: `transfer` from rank to peer, or `reduce` at rank (peer is -1).
        rank: where; the sender of a transfer.
        peer: the receiver of a transfer.
        step: index into the rank's program.
        tile: index of the message's tile.
        chunks: (first, count).
        nbytes: of the chunks.
        start_s: seconds.
        end_s: seconds.
    """

    kind: str
    rank: int
    peer: int
    step: int
    tile: int
    chunks: tuple[int, int]
    nbytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated course of one collective.

    Args:
        time_s: until the last rank is done, seconds.
        rank_time_s: until each rank is done, seconds.
        sent_bytes: per rank; what several peers read from one slot counts once per reader.
        events: by ascending start.
    """

    time_s: float
    rank_time_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    events: tuple[Event, ...]

    def draw(self, path: str | Path | None = None, **options: Any) -> Any:
        """Draws the timeline; see pycoll.draw.draw_simulation."""
        from pycoll.draw import draw_simulation

        return draw_simulation(self, path, **options)
