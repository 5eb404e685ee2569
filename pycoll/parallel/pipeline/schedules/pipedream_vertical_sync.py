"""PipeDream with vertical sync: a microbatch uses weights of one age in all stages."""

from __future__ import annotations

from pycoll.parallel.pipeline.schedules.actions import Schedule
from pycoll.parallel.pipeline.schedules.one_forward_one_backward import live_1f1b
from pycoll.parallel.pipeline.schedules.pipedream import bubble, stream
from pycoll.parallel.pipeline.schedules.registry import Generator


def make(p: int, m: int, v: int) -> Schedule:
    """PipeDream, where every stage uses the weights of the updates that the first one had seen.

    Microbatch i enters the first stage after max(0, i - (p - 1)) updates, so gradients of all
    stages are min(i, p - 1) updates old: those of a model that existed as a whole.

    Cost: as PipeDream, but every rank keeps up to p versions of its weights.
    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.3.
    """
    versions = [max(0, i - (p - 1)) for i in range(m)]
    return stream("pipedream_vertical_sync", p, m, versions=versions)


def staleness(p: int, stage: int, microbatch: int) -> int:
    """Updates of a stage that the weights of a microbatch lack at its backward."""
    return min(microbatch, p - 1)


ROWS = (
    Generator(
        name="pipedream_vertical_sync",
        make=make,
        bubble=bubble,
        live=live_1f1b,
        summary="pipedream whose microbatches use weights of one age in all stages",
        source="Narayanan et al., PipeDream, SOSP 2019, arXiv 1806.03377",
        allowed_stages=(1,),
        staleness=staleness,
    ),
)
