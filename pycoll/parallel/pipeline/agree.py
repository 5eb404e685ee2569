"""Checks, before the first byte of a step, that all ranks have the same batch."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.errors import UsageError
from pycoll.parallel.pipeline.microbatches import signature

if TYPE_CHECKING:
    from pycoll.communicator import Communicator


def agree(
    comm: Communicator,
    placement: tuple[int, ...],
    calls: list[Any] | None,
    targets: list[Any] | None,
    has_loss: bool,
) -> tuple[int, int]:
    """Agrees on the number and the shapes of the microbatches. Collective.

    Args:
        comm: Communicator of the pipeline.
        placement: The rank of each stage.
        calls: The microbatches of this rank; None if it has none.
        targets: The targets of this rank; None if it has none.
        has_loss: Whether targets are needed.

    Returns:
        The number of microbatches, and a number that identifies their shapes.

    Raises:
        UsageError: The ranks' batches do not fit together; raised on all ranks.

    Cost: one small all_gather.
    """
    mine = np.array(
        [
            -1 if calls is None else len(calls),
            -1 if targets is None else len(targets),
            zlib.crc32(signature(calls).encode()) if calls else 0,
            has_loss,
        ],
        np.int64,
    )
    everyone = np.asarray(comm.all_gather(mine)).reshape(comm.size, -1)
    first, last = placement[0], placement[-1]
    num = int(everyone[first, 0])
    if num < 0:
        raise UsageError(f"rank {first} has the first stage, but no inputs")
    for rank, (inputs, _, shapes, _) in enumerate(everyone.tolist()):
        if inputs not in (-1, num):
            raise UsageError(
                f"rank {rank} has {inputs} microbatches, rank {first} has {num}: give all "
                "ranks of a pipeline the same batch"
            )
        if inputs > 0 and shapes != everyone[first, 2]:
            raise UsageError(
                f"the inputs of rank {rank} have other shapes than those of rank {first}: give "
                "all ranks of a pipeline the same batch"
            )
    if everyone[last, 3] and everyone[last, 1] != num:
        raise UsageError(
            f"rank {last} has the last stage, and targets for {max(0, everyone[last, 1])} "
            f"microbatches, expected {num}"
        )
    return num, int(everyone[first, 2])


__all__ = ["agree"]
