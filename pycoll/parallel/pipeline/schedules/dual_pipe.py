"""DualPipe, halved: two stages per rank, down and up again, a forward beside every backward."""

from __future__ import annotations

from collections import Counter

from pycoll.parallel.pipeline.schedules.actions import Action, Costs, Kind, Schedule, v_placement
from pycoll.parallel.pipeline.schedules.registry import Generator


def make(p: int, m: int, v: int) -> Schedule:
    """Cost: zbv's bubble where f = i = w; live 2 p + 1 chunks of half a rank.

    A GPU may run the forward and the backward of a pair concurrently; here they run in sequence.

    Source: DeepSeek-AI, DualPipe, and its half by Sea AI Lab; the order equals torch's.
    """
    return Schedule("dualpipev", m, v_placement(p), tuple(_order(p, m, r) for r in range(p)))


def _order(p: int, m: int, rank: int) -> tuple[Action, ...]:
    """The rank's actions; `down` is its stage on the way down, `up` its stage on the way up."""
    down, up = rank, 2 * p - 1 - rank
    behind = p - 1 - rank
    enough = max(2 * p, m)  # the pattern's minimum; microbatches beyond m are left out
    order: list[Action] = []
    waiting: list[Action] = []  # weight gradients
    done: Counter[tuple[int, bool]] = Counter()

    def add(stage: int, kind: Kind) -> None:
        forward = kind is Kind.F
        i = done[stage, forward]
        done[stage, forward] += 1
        if i < m:
            order.append(Action(stage, kind, i))
            if kind is Kind.I:
                waiting.append(Action(stage, Kind.W, i))

    def fill() -> None:
        if waiting:
            order.append(waiting.pop(0))

    for _ in range(2 * behind):
        add(down, Kind.F)
    for _ in range(rank + 1):
        add(down, Kind.F)
        add(up, Kind.F)
    for _ in range(behind):
        add(up, Kind.I)
        fill()
        add(up, Kind.F)
    for _ in range(enough - 2 * p + rank + 1):
        add(down, Kind.F)
        add(up, Kind.B)
        add(up, Kind.F)
        add(down, Kind.B)
    for _ in range(behind):
        add(up, Kind.B)
        add(up, Kind.F)
        add(down, Kind.B)
    for i in range(2 * (rank + 1)):
        add(down if i % 2 else up, Kind.I if i > rank else Kind.B)
    for _ in range(behind):
        fill()
        add(down, Kind.I)
    return (*order, *waiting)


def bubble(p: int, m: int, v: int, costs: Costs) -> float:
    holes = 2 * p - m - (m <= p)  # microbatches that the pattern lacks
    return (p - 1 + 2 * max(0, holes)) / (6 * m)


def exact(p: int, m: int, v: int, costs: Costs) -> bool:
    return costs.forward == costs.backward_input == costs.backward_weight


def live(p: int, m: int, v: int, rank: int) -> int:
    return min(2 * m, 2 * p + 1, m + rank + 1)


ROWS = (
    Generator(
        name="dualpipev",
        make=make,
        bubble=bubble,
        exact=exact,
        live=live,
        summary="zbv with whole backwards in the middle, each with a forward beside it",
        source="DeepSeek-AI, DualPipe (github.com/deepseek-ai/DualPipe), DualPipeV",
        default_stages=2,
        allowed_stages=(2,),
        torch_name="DualPipeV",
    ),
)
