"""Seconds and bytes that a layout needs at least: what a search need not simulate, or trace.

Invariant: no layout is predicted to be faster or smaller than its bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pycoll.parallel import pipeline
from pycoll.parallel.planner.layouts import Layout
from pycoll.parallel.planner.network import Network
from pycoll.parallel.planner.pieces import Piece, Pieces
from pycoll.parallel.planner.step import Stage, Step
from pycoll.topology import Device

# Long steps are extrapolated, which is exact but for rounding.
_ROUNDING = 1e-6
# Products with weights are shared out evenly along a sequence.
_EVEN = {"aten.mm", "aten.addmm"}


def least_s(step: Step) -> float:
    """Seconds of a step at least: each rank waits for its first microbatch only.

    Behind the last backward pass of a rank, its gradient still passes the stages before, unless
    the schedule ends with the gradients of weights.

    Source: PipeDream, SOSP 2019, section 3.1: the slowest stage of the best cut.
    """
    m, way_s, totals = step.layout.microbatches, 0.0, []
    drains = not step.placed(1).schedule.splits_backward
    first_s = sum(step.after_s(step.ranks[0]).values())
    for rank, stages in enumerate(step.ranks):
        passes_s = m * sum(map(_passes_s, stages))
        totals.append(passes_s + sum(step.after_s(stages).values()))
        if drains:
            totals.append(way_s + passes_s + first_s)
        way_s += _passes_s(step.stages[rank]) + 2 * step.transfer_s()
    return max(totals) * (1 - _ROUNDING)


def _passes_s(stage: Stage) -> float:
    return stage.forward_s + stage.backward_s


def least_bytes(step: Step) -> int:
    """Bytes of the rank that keeps most, if each of its stages kept as little as its least one."""
    layout, few, found = step.layout, step.few_microbatches(), []
    generator = pipeline.generator(layout.schedule)
    for rank, stages in enumerate(step.ranks):
        least, live = min(sum(piece.kept for piece in stage.pieces) for stage in stages), 1
        if layout.pp > 1:
            live = generator.live(layout.pp, few, generator.default_stages, rank)
        found.append(step.lasting(stages) + live * least)
    return max(found)


def shared_s(piece: Piece, layout: Layout, network: Network, device: Device) -> float:
    """Seconds that both passes of a piece need at least if cp shares its sequence out.

    Args:
        piece: The piece without cp.
        layout: The layout; cp and tp matter.
        network: The network of the layout.
        device: The device.

    Returns:
        Seconds. An operator of a share takes its start, and its part of the whole; causal attention
        may skip half of that.
    """
    passes = 0.0
    for (name, flops, nbytes), count in piece.operators.items():
        part = layout.cp if name in _EVEN or layout.cp == 1 else 2 * layout.cp
        passes += count * device.seconds(flops / part, nbytes / part)
    for (axes, collective, nbytes), count in (piece.forward_calls + piece.backward_calls).items():
        if collective != "send" and "cp" not in axes.split("+"):
            passes += count * network.collective_s(collective, nbytes / layout.cp, *axes.split("+"))
    return passes


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of a microbatch at least, in all stages.

    Attributes:
        blocks: All blocks.
        least_block: The block that takes least; 0 without blocks.
        ends: What comes before and behind the blocks.
    """

    blocks: float
    least_block: float
    ends: float


def untraced(pieces: Pieces, layout: Layout, network: Network, device: Device) -> Passes:
    """Bounds of a share by pieces without cp."""
    each = {id(piece): piece for piece in (pieces.first, *pieces.blocks, pieces.last)}
    known = {key: shared_s(piece, layout, network, device) for key, piece in each.items()}
    blocks = [known[id(block)] for block in pieces.blocks]
    ends = known[id(pieces.first)] + known[id(pieces.last)]
    return Passes(sum(blocks), min(blocks, default=0.0), ends)


def untraced_s(passes: Passes, layout: Layout, num_blocks: int) -> float:
    """Seconds of a step at least: a rank has its part of all passes, and its number of blocks."""
    most = math.ceil(num_blocks / layout.pp) * passes.least_block
    most = max(most, (passes.blocks + passes.ends) / layout.pp)
    return most * layout.microbatches * (1 - _ROUNDING)


__all__ = ["Passes", "least_bytes", "least_s", "untraced", "untraced_s"]
