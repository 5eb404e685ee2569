"""Splits a batch, a tensor or a structure of tensors, into microbatches of even or uneven size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycoll.errors import UsageError
from pycoll.parallel.core.specs import describe, replace

Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a model


def split_batch(batch: Any, num_microbatches: int | None) -> list[Any] | None:
    """Splits a batch along the first axis of its tensors.

    Args:
        batch: A tensor; a tuple or dict of tensors and values that are not split; a list of
            microbatches; or None if another rank has the batch.
        num_microbatches: Number of microbatches. If a batch does not divide, some get one more
            sample; if it has fewer samples, there are fewer microbatches. None: one, or the
            length of the list.

    Returns:
        The microbatches; None if `batch` is None.

    Raises:
        UsageError: Tensors differ in their number of samples, or a list has another length.
    """
    if batch is None:
        return None
    if isinstance(batch, list):
        if num_microbatches is not None and batch and len(batch) != num_microbatches:
            raise UsageError(
                f"{len(batch)} microbatches are given in a list, but microbatches is "
                f"{num_microbatches}: give one or the other"
            )
        return batch
    samples = num_samples(batch)
    if samples == 0:
        return []
    count = min(num_microbatches or 1, samples)
    bounds = [samples * i // count for i in range(count + 1)]

    def part(i: int) -> Any:
        return replace(batch, torch.Tensor, lambda tensor: tensor[bounds[i] : bounds[i + 1]])

    return [part(i) for i in range(count)]


def num_samples(batch: Any) -> int:
    """Length of the first axis of all tensors in a structure.

    Raises:
        UsageError: The lengths differ, or there is no tensor.
    """
    lengths: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0:
            raise UsageError(
                "a tensor of the batch has no axis to split along: pass a Python number"
            )
        lengths.add(tensor.shape[0])
        return tensor

    replace(batch, torch.Tensor, note)
    if len(lengths) != 1:
        raise UsageError(
            f"the tensors of a batch have {sorted(lengths) or 'no'} samples: expected one number"
        )
    return lengths.pop()


def as_call(microbatch: Any) -> Call:
    """The arguments of the model's call: a tuple is positional, a dict is by keyword."""
    if isinstance(microbatch, Mapping):
        return (), dict(microbatch)
    if isinstance(microbatch, tuple):
        return microbatch, {}
    return (microbatch,), {}


def signature(microbatches: Sequence[Any]) -> str:
    """Describes shapes and types of microbatches; equal ones need no new agreement."""
    return repr([describe(microbatch) for microbatch in microbatches])


__all__ = ["Call", "as_call", "num_samples", "signature", "split_batch"]
