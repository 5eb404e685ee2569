"""Zero bubble: weight gradients fill the time in which ranks would otherwise wait."""

from __future__ import annotations

from pycoll.parallel.pipeline.schedules.actions import (
    Action,
    Costs,
    Kind,
    Schedule,
    interleaved_placement,
    v_placement,
)
from pycoll.parallel.pipeline.schedules.one_forward_one_backward import sequences
from pycoll.parallel.pipeline.schedules.order import in_turn, rounds, split_backward
from pycoll.parallel.pipeline.schedules.registry import Generator


def make_zb1p(p: int, m: int, v: int) -> Schedule:
    """Cost: bubble (p - 1)(f + i - w) / (m v (f + i + w)); live about p v, like 1F1B's first rank.

    Source: Qi et al., arXiv 2401.10241, ZB-H1; for v > 1 as in torch.
    """
    size = len(rounds(m, p)[0])
    orders = []
    for rank in range(p):
        order = in_turn(*sequences(p, m, v, rank), (v - 1) * size + p - 1 - rank)
        orders.append(split_backward(order, delay=rank))
    return Schedule("zb1p", m, interleaved_placement(p, v), tuple(orders))


def make_zb2p(p: int, m: int, v: int) -> Schedule:
    """Cost: no bubble within a rank's own work where f = i = w and m >= 2 p - 1; live 2 p - 1.

    It has twice the warm-up of 1F1B and as many more actions to fill the end: each rank's work is
    contiguous, and begins and ends a forward later than that of the rank before.

    Source: Qi et al., arXiv 2401.10241, ZB-H2.
    """
    orders = []
    for rank in range(p):
        order = in_turn(*sequences(p, m, 1, rank), 2 * (p - 1 - rank))
        orders.append(split_backward(order, delay=2 * rank))
    return Schedule("zb2p", m, interleaved_placement(p, 1), tuple(orders))


def make_zbv(p: int, m: int, v: int) -> Schedule:
    """Cost: no bubble within a rank's own work where f = i = w; live 2 p chunks of half a rank.

    Source: Qi et al., Controllable Memory, arXiv 2405.15362; the order is torch's.
    """
    orders = tuple(_zbv_order(p, m, rank) for rank in range(p))
    return Schedule("zbv", m, v_placement(p), orders)


def _zbv_order(p: int, m: int, rank: int) -> tuple[Action, ...]:
    """The rank's actions; `down` is its stage on the way down, `up` its stage on the way up."""
    down, up = rank, 2 * p - 1 - rank
    enough = max(2 * p - 1, m)  # the pattern's minimum; microbatches beyond m are left out
    order: list[Action] = []
    done = {(stage, kind): 0 for stage in (down, up) for kind in (Kind.F, Kind.I, Kind.W)}

    def add(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            if done[stage, kind] < m:
                order.append(Action(stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    for _ in range(2 * (p - rank) - 1):
        add(down, Kind.F)
    for _ in range(rank):
        add(up, Kind.F)
        add(down, Kind.F)
    for _ in range(p - rank):
        add(up, Kind.F, Kind.I, Kind.W)
    while done[up, Kind.F] < done[down, Kind.F] or done[down, Kind.F] < enough:
        if done[down, Kind.F] < enough:
            add(down, Kind.F)
        add(down, Kind.I, Kind.W)
        add(up, Kind.F, Kind.I, Kind.W)
    for _ in range(rank):
        add(down, Kind.I)
        add(up, Kind.I)
    for _ in range(p - rank):
        add(down, Kind.I, Kind.W)
    for stage in (up, down):
        while done[stage, Kind.W] < done[stage, Kind.I]:
            add(stage, Kind.W)
    return tuple(order)


def bubble_zb1p(p: int, m: int, v: int, costs: Costs) -> float:
    f, i, w = costs.forward, costs.backward_input, costs.backward_weight
    chunks = (p - 1) * (f + i - w)
    # With fewer microbatches than ranks, weight gradients are too few for the gaps.
    chunks += f * (v * max(0, p - m) + (v - 1) * max(0, p - 2 * m))
    return chunks / (m * v * costs.total)


def exact_zb1p(p: int, m: int, v: int, costs: Costs) -> bool:
    f, i, w = costs.forward, costs.backward_input, costs.backward_weight
    return f == i == w or (m >= p and w <= f)


def bubble_zb2p(p: int, m: int, v: int, costs: Costs) -> float:
    # With few microbatches, there are too few forwards for the gaps.
    chunks = p - 1 + max(0, 2 * p - 1 - m) // 2
    return chunks * costs.forward / (m * costs.total)


def exact_zb2p(p: int, m: int, v: int, costs: Costs) -> bool:
    f, i, w = costs.forward, costs.backward_input, costs.backward_weight
    return f == i == w or (m >= 2 * p - 1 and f <= i + w)


def bubble_zbv(p: int, m: int, v: int, costs: Costs) -> float:
    return max(p - 1, 4 * (p - 1) - 2 * (m - 1)) / (6 * m)


def exact_zbv(p: int, m: int, v: int, costs: Costs) -> bool:
    return costs.forward == costs.backward_input == costs.backward_weight


def live_zb1p(p: int, m: int, v: int, rank: int) -> int:
    size = len(rounds(m, p)[0])
    return min(m * v, (v - 1) * size + p)


def live_zb2p(p: int, m: int, v: int, rank: int) -> int:
    return min(m, 2 * p - 1)


def live_zbv(p: int, m: int, v: int, rank: int) -> int:
    return min(2 * m, 2 * p, m + rank + 1)


ROWS = (
    Generator(
        name="zb1p",
        make=make_zb1p,
        bubble=bubble_zb1p,
        exact=exact_zb1p,
        live=live_zb1p,
        summary="1F1B with weight gradients in the gaps: a third of its bubble, the same memory",
        source="Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
        torch_name="InterleavedZeroBubble",
    ),
    Generator(
        name="zb2p",
        make=make_zb2p,
        bubble=bubble_zb2p,
        exact=exact_zb2p,
        live=live_zb2p,
        summary="no bubble within a rank's own work, for twice the memory of zb1p",
        source="Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
        allowed_stages=(1,),
    ),
    Generator(
        name="zbv",
        make=make_zbv,
        bubble=bubble_zbv,
        exact=exact_zbv,
        live=live_zbv,
        summary="two stages per rank, down and up again: no bubble within a rank's own work",
        source="Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362",
        default_stages=2,
        allowed_stages=(2,),
        torch_name="ZBVZeroBubble",
    ),
)
