"""Before the first byte of a step: the ranks see that they were given the same batch."""

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
    """All ranks learn how many microbatches there are, and of which shapes. Collective.

    Args:
        comm: Of the pipeline.
        placement: The rank of each stage.
        calls: The microbatches that this rank was given, None for none.
        targets: The same of targets.
        has_loss: Whether targets are needed.

    Returns:
        The number of microbatches, and a number that stands for their shapes.

    Raises:
        UsageError: on all ranks, where what they were given does not fit together.

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
        raise UsageError(f"rank {first} has the first stage, and no inputs")
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
