"""Sums gradients of parameters that several stages have over the stages' ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pycoll.parallel.pipeline.stages import Stages

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

_TAG = 1 << 30  # above the tags of microbatches


Before = dict[str, torch.Tensor]


def _held(
    stages: Stages, placement: tuple[int, ...], comm: Communicator
) -> list[tuple[int, str, list[int]]]:
    """Yields parameters that this rank shares: a number, the name, and all ranks that hold it."""
    found = []
    for number, (name, holders) in enumerate(stages.shared.items()):
        ranks = sorted({placement[stage] for stage in holders})
        if comm.rank in ranks and len(ranks) > 1:
            found.append((number, name, ranks))
    return found


def set_aside(stages: Stages, placement: tuple[int, ...], comm: Communicator) -> Before:
    """Removes and returns shared parameters' `.grad` of earlier steps, which is already summed."""
    before = {}
    for _, name, _ in _held(stages, placement, comm):
        gradient = stages.shared_parameter(name).grad
        if gradient is not None:
            before[name] = gradient.clone()
            gradient.zero_()
    return before


def sum_shared_gradients(
    stages: Stages, placement: tuple[int, ...], comm: Communicator, before: Before
) -> None:
    """Adds up `.grad` of parameters that stages of several ranks share, in place.

    All holders add in rank order, so their sums are bit-identical.

    Args:
        stages: The stages, with the names of shared parameters.
        placement: The rank of each stage.
        comm: Communicator of the pipeline.
        before: Gradients that `set_aside` returned; they are added back.

    Cost: each rank sends each of its shared parameters' gradients to every other holder.
    """
    for number, name, ranks in _held(stages, placement, comm):
        parameter = stages.shared_parameter(name)
        _sum(parameter, ranks, comm, _TAG + number)
        if name in before and parameter.grad is not None:
            parameter.grad.add_(before[name])


def _sum(parameter: torch.nn.Parameter, ranks: list[int], comm: Communicator, tag: int) -> None:
    own = parameter.grad
    others = [rank for rank in ranks if rank != comm.rank]
    flag = np.array([own is not None], np.uint8)
    works = [comm.send(flag, rank, tag, async_op=True) for rank in others]
    if own is not None:
        value = own.detach().clone(memory_format=torch.contiguous_format)
        works += [comm.send(value, rank, tag, async_op=True) for rank in others]
    parts = {} if own is None else {comm.rank: value}
    for rank in others:
        there = np.empty(1, np.uint8)
        comm.recv(there, rank, tag)
        if there[0]:
            parts[rank] = torch.empty(parameter.shape, dtype=parameter.dtype)
            comm.recv(parts[rank], rank, tag)
    for work in works:
        work.wait()
    if not parts:
        return  # no rank used it
    total = None
    for rank in sorted(parts):
        total = parts[rank].clone() if total is None else total.add_(parts[rank])
    assert total is not None
    if parameter.grad is None:
        parameter.grad = total
    else:
        parameter.grad.copy_(total)


__all__ = ["sum_shared_gradients"]
