"""Results of a simulation on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LevelUse", "NetworkSimulation", "Timeline"]


@dataclass(frozen=True, slots=True)
class LevelUse:
    """Traffic on the links of one level.

    Args:
        level: name of the level.
        num_links: number of links with traffic; a link has two halves, up and down.
        nbytes: total bytes on these links.
        utilization: of these links together: bytes carried over what they could have carried
            until the end, 0 to 1.
        busiest: name of the link that needs most time for its traffic.
        busiest_utilization: utilization of that link.
    """

    level: str
    num_links: int
    nbytes: float
    utilization: float
    busiest: str
    busiest_utilization: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Utilization of the links as time goes by.

    Args:
        bin_s: width of a bin, seconds.
        utilization: by level name: in each bin, of the level's links that carry anything, 0 to 1.
    """

    bin_s: float
    utilization: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class NetworkSimulation:
    """The simulated course of one collective on a cluster.

    Args:
        collective: such as `all_reduce`.
        algorithm: its name, with the levels that a hierarchical one works on.
        nbytes: of the message.
        num_ranks: of the cluster.
        time_s: from the first start until the last rank is done, seconds.
        rank_time_s: until each rank is done, seconds.
        levels: what the links carried, from the inside out; levels that carried nothing are left
            out.
        num_classes: classes of equivalent ranks; num_ranks when all were simulated one by one.
        num_messages: number of simulated messages.
        inexact: deviations of the result from the model; empty when it is exact.
        busbw_factor: ratio of busbw to algbw.
        timeline: use of the links over time, if it was requested.
    """

    collective: str
    algorithm: str
    nbytes: int
    num_ranks: int
    time_s: float
    rank_time_s: tuple[float, ...]
    levels: tuple[LevelUse, ...]
    num_classes: int
    num_messages: int
    inexact: tuple[str, ...]
    busbw_factor: float
    timeline: Timeline | None = None

    @property
    def algbw(self) -> float:
        """Bytes of the message per second."""
        return self.nbytes / self.time_s if self.time_s > 0 else 0.0

    @property
    def busbw(self) -> float:
        """algbw times the collective's factor, bytes per second."""
        return self.algbw * self.busbw_factor

    @property
    def bottleneck(self) -> LevelUse | None:
        """The level with the busiest link of all."""
        return max(self.levels, key=lambda use: use.busiest_utilization, default=None)

    def draw(self, path: str | Path | None = None, **options: Any) -> Any:
        """Draws the links' utilization over time; see pycoll.draw.draw_network."""
        from pycoll.draw import draw_network

        return draw_network([self], path, **options)
