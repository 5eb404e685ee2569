"""Sums gradients of parameters that several stages have over the stages' ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pycoll.parallel.core.transfers import Transfers
from pycoll.parallel.pipeline.stages import Stages

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

Before = dict[str, torch.Tensor]


def _held(
    stages: Stages, placement: tuple[int, ...], transfers: Transfers
) -> list[tuple[str, Communicator]]:
    """Parameters that this rank shares, with the communicator of all ranks that hold each."""
    found = []
    for name, holders in stages.shared.items():
        ranks = sorted({placement[stage] for stage in holders})
        group = transfers.group(ranks) if len(ranks) > 1 else None
        if group is not None:
            found.append((name, group))
    return found


def set_aside(stages: Stages, placement: tuple[int, ...], transfers: Transfers) -> Before:
    """Removes and returns shared parameters' `.grad` of earlier steps, which is already summed."""
    before = {}
    for name, _ in _held(stages, placement, transfers):
        gradient = stages.shared_parameter(name).grad
        if gradient is not None:
            before[name] = gradient.clone()
            gradient.zero_()
    return before


def sum_shared_gradients(
    stages: Stages, placement: tuple[int, ...], transfers: Transfers, before: Before
) -> None:
    """Adds up `.grad` of parameters that stages of several ranks share, in place. Collective.

    All holders add in rank order, so their sums are bit-identical.

    Args:
        stages: The stages, with the names of shared parameters.
        placement: The rank of each stage.
        transfers: Those of the pipeline's ranks.
        before: Gradients that `set_aside` returned; they are added back.

    Cost: an all_reduce of each of this rank's shared parameters over its holders, and one of a
        byte.
    """
    for name, group in _held(stages, placement, transfers):
        parameter = stages.shared_parameter(name)
        _sum(parameter, group)
        if name in before and parameter.grad is not None:
            parameter.grad.add_(before[name])


def _sum(parameter: torch.nn.Parameter, group: Communicator) -> None:
    own = parameter.grad
    used = np.array([own is not None], np.uint8)
    group.all_reduce(used, "max")
    if not used[0]:
        return  # no rank used it
    if own is None:
        total = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    else:
        total = own.detach().clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, deterministic=True)
    if own is None:
        parameter.grad = total
    else:
        own.copy_(total)


__all__ = ["set_aside", "sum_shared_gradients"]
