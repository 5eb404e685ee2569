"""PipeDream-2BW: an update for each p microbatches, and two versions of the weights."""

from __future__ import annotations

from pycoll.parallel.pipeline.schedules.actions import Schedule
from pycoll.parallel.pipeline.schedules.one_forward_one_backward import live_1f1b
from pycoll.parallel.pipeline.schedules.pipedream import bubble, stream
from pycoll.parallel.pipeline.schedules.registry import Generator


def make(p: int, m: int, v: int) -> Schedule:
    """1F1B without a flush, whose updates have the gradients of p microbatches each.

    The microbatches of update k use the weights of update k - 1 in all stages, so that gradients
    are one update old, whatever p is. On one rank they are new.

    Cost: no bubble between the first and the last backward; live min(m, p - rank); two versions of
        the weights.
    Source: Narayanan et al., Memory-efficient pipeline-parallel DNN training, ICML 2021, section 3.
    """
    versions = [max(0, i // p - 1) for i in range(m)] if p > 1 else ()
    return stream("pipedream_2bw", p, m, p, versions)


def staleness(p: int, stage: int, microbatch: int) -> int:
    """Updates of a stage that the weights of a microbatch lack at its backward."""
    return min(microbatch // p, 1) if p > 1 else 0


ROWS = (
    Generator(
        name="pipedream_2bw",
        make=make,
        bubble=bubble,
        live=live_1f1b,
        summary="no flush: an update for each p microbatches, by gradients that are one update old",
        source="Narayanan et al., ICML 2021, arXiv 2006.09503",
        allowed_stages=(1,),
        staleness=staleness,
    ),
)
