"""Batches: each replica's share of a loader's batches, and the microbatches of a share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.placement import share


class Batch(NamedTuple):
    """One replica's share of a batch."""

    x: Any
    y: Any


def shard(loader: Iterable[Any], mesh: Mesh) -> Iterator[Batch]:
    """Yields this replica's share of each batch of a loader that is identical on all ranks.

    A sample's place in the batch of all replicas does not depend on the mesh. If a batch does not
    divide, shares differ by one sample. If the last batch is smaller than the others, some replicas
    get an empty share and still take part.

    Args:
        loader: Yields pairs of inputs and targets: tensors whose first dimension counts samples, or
            tuples or dicts of them; the same on every rank.
        mesh: The ranks.

    Yields:
        The share of the next batch, on the mesh's device.

    Raises:
        UsageError: A batch is smaller than the number of replicas.
    """
    replicas, dealing = mesh.line_of_dp("ep"), mesh.dealing()
    num_replicas = replicas.size
    largest = 0
    for x, y in loader:
        size = num_samples(x)
        if size < num_replicas and size >= largest:
            raise UsageError(
                f"a batch of {size} samples is smaller than {replicas.axis.replace('+', ' x ')}="
                f"{num_replicas}: make batches larger, or the mesh smaller"
            )
        largest = max(largest, size)
        start, stop = dealing.samples(size)

        def mine(t: Tensor) -> Tensor:
            return t[start:stop].to(mesh.device)  # noqa: B023

        yield Batch(_map(x, mine), _map(y, mine))


def num_samples(batch: Any) -> int:
    """Length of the first dimension of the batch's tensors."""
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    return num_samples(batch[0]) if isinstance(batch, (tuple, list)) else len(batch)


def split(x: Any, y: Any, microbatches: int) -> list[tuple[Any, Any]]:
    """Consecutive parts whose sizes differ by at most one sample; none of them is empty.

    Raises:
        UsageError: `microbatches` is less than 1.
    """
    if microbatches < 1:
        raise UsageError(f"microbatches is {microbatches}, expected 1 or more")
    size = num_samples(x)
    parts = []
    for i in range(min(microbatches, size)):
        start, stop = share(size, min(microbatches, size), i)
        parts.append((part_of(x, start, stop), part_of(y, start, stop)))
    return parts


def nothing(x: Any, y: Any) -> tuple[Any, Any]:
    """A microbatch without samples."""
    return part_of(x, 0, 0), part_of(y, 0, 0)


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of inputs or targets."""
    return _map(batch, lambda t: t[start:stop])


def copied(batch: Any) -> Any:
    """A copy of inputs or targets in memory of its own."""
    return _map(batch, lambda t: t.clone())


def as_call(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model's call: a tuple is positional, a dict is by keyword."""
    if isinstance(x, dict):
        return (), x
    return (x, {}) if isinstance(x, tuple) else ((x,), {})


def to_floating(batch: Any, model: nn.Module) -> Any:
    """Converts floating tensors to float64 for a float64 model, as `pycoll check` needs it."""
    first = next(iter(model.parameters()), None)
    if first is None or first.dtype != torch.float64:
        return batch
    return _map(batch, lambda t: t.double() if t.is_floating_point() else t)


def _map(batch: Any, function: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _map(value, function) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(value, function) for value in batch)
    return batch


__all__ = [
    "Batch",
    "as_call",
    "copied",
    "nothing",
    "num_samples",
    "part_of",
    "shard",
    "split",
    "to_floating",
]
