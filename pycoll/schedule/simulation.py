"""The course of a collective in simulated time; see csrc/schedule/simulate.h."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Event", "Simulation"]


@dataclass(frozen=True, slots=True)
class Event:
    """A transfer or a reduction in a simulation.

    Args:
        kind: `transfer` from rank to peer, or `reduce` at rank (peer is -1).
        rank: rank of the event; the sender of a transfer.
        peer: the receiver of a transfer.
        step: index into the rank's program.
        tile: index of the message's tile.
        chunks: (first, count).
        nbytes: size of the chunks, in bytes.
        start_s: start, in seconds.
        end_s: end, in seconds.
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
        time_s: time until the last rank is done, in seconds.
        rank_time_s: time until each rank is done, in seconds.
        sent_bytes: bytes sent by each rank; a slot with several readers counts once per reader.
        events: all events, by ascending start.
    """

    time_s: float
    rank_time_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    events: tuple[Event, ...]

    def draw(self, path: str | Path | None = None, **options: Any) -> Any:
        """Draws the timeline; see pycoll.draw.draw_simulation."""
        from pycoll.draw import draw_simulation

        return draw_simulation(self, path, **options)
