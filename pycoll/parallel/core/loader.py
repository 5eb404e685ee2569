"""A loader that reads only this replica's samples, in an order that no mesh changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import Batch, nothing
from pycoll.parallel.core.mesh import Mesh


class Loader:
    """The batches of one epoch at a time; iterating goes on where the last iteration ended.

    An epoch has each sample exactly once. Its order follows from the seed and the epoch's number,
    so each mesh trains on the same batches. The last batch may be smaller.

    Attributes:
        epoch: Number of the epoch that the next batch belongs to.
        place: Number of batches of this epoch that have been yielded.
    """

    def __init__(
        self,
        dataset: Any,
        batch: int,
        mesh: Mesh,
        *,
        seed: int | None,
        collate: Callable[[list[Any]], Any],
        prefetch: int,
    ) -> None:
        self.epoch, self.place = 0, 0
        self._dataset, self._batch, self._seed = dataset, batch, seed
        self._dealing = mesh.dealing()
        self._collate, self._prefetch = collate, prefetch

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return -(-len(self._dataset) // self._batch)

    def __iter__(self) -> Iterator[Batch]:
        """Yields this replica's shares of the remaining batches of the epoch."""
        order = self._order()
        mine = [self._mine(order[at : at + self._batch]) for at in self._starts()]
        read = self._read_ahead if self._prefetch else self._read_each
        for batch in read(mine):
            self.place += 1
            if self.place == len(self):  # a checkpoint within the last batch's step resumes behind
                self.epoch, self.place = self.epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, the same on every rank and every mesh."""
        return {"epoch": self.epoch, "place": self.place, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place that `state_dict` of a loader of the same data returned.

        Raises:
            UsageError: The loader has another number of samples, batch or seed.
        """
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise UsageError(
                    f"loader: the saved place is one with {key} {state.get(key)}, expected "
                    f"{value}: make the loader as it was, or begin a new epoch"
                )
        self.epoch, self.place = int(state["epoch"]), int(state["place"])

    def _identity(self) -> dict[str, Any]:
        return {"samples": len(self._dataset), "batch": self._batch, "seed": self._seed}

    def _order(self) -> list[int]:
        """The order of this epoch's samples."""
        size = len(self._dataset)
        if self._seed is None:
            return list(range(size))
        # torch's generators of neighbouring seeds are independent; 2**20 epochs stay apart.
        random = torch.Generator().manual_seed(self._seed * (1 << 20) + self.epoch)
        order: list[int] = torch.randperm(size, generator=random).tolist()
        return order

    def _starts(self) -> range:
        return range(self.place * self._batch, len(self._dataset), self._batch)

    def _mine(self, indices: list[int]) -> tuple[list[int], bool]:
        """The samples to read, and whether they are there for their shapes only."""
        start, stop = self._dealing.samples(len(indices))
        return indices[start:stop] or indices[:1], start == stop

    def _read(self, indices: list[int], empty: bool) -> Batch:
        x, y = self._collate([self._dataset[i] for i in indices])
        return Batch(*(nothing(x, y) if empty else (x, y)))

    def _read_each(self, batches: list[tuple[list[int], bool]]) -> Iterator[Batch]:
        for batch in batches:
            yield self._read(*batch)

    def _read_ahead(self, batches: list[tuple[list[int], bool]]) -> Iterator[Batch]:
        """Reads in a thread while the caller trains."""
        with ThreadPoolExecutor(1, "pycoll-loader") as thread:
            coming: list[Future[Batch]] = []
            for batch in batches:
                coming.append(thread.submit(self._read, *batch))
                if len(coming) > self._prefetch:
                    yield coming.pop(0).result()
            while coming:
                yield coming.pop(0).result()


def loader(
    dataset: Any,
    batch: int,
    mesh: Mesh,
    *,
    seed: int | None = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    prefetch: int = 0,
) -> Loader:
    """Makes a loader of which each rank reads only the samples of its replica.

    Args:
        dataset: Has `len(dataset)`, and pairs of inputs and targets as `dataset[i]`; identical on
            all ranks.
        batch: Samples of a batch of all replicas; if it does not divide, shares differ by one.
        mesh: The ranks. Ranks of one replica (tp, cp, pp) read the same samples.
        seed: Shuffles each epoch; None: the order of the dataset.
        collate: Makes (x, y) of a list of samples; None: torch's `default_collate`.
        prefetch: Batches that a thread reads ahead. The state of the loader does not count them.

    Returns:
        The loader. `for x, y in loader` is one epoch, or what is left of it after
        `load_state_dict`; `pc.save(..., state={"loader": loader})` writes its place.

    Raises:
        UsageError: The dataset has no length or no samples, or a batch is smaller than the number
            of replicas.

    Cost: one permutation of the samples' numbers per epoch; no communication. A replica whose
        share of the last batch is empty reads one sample, for its shapes.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"loader: {type(dataset).__name__} has no length or no samples by number: "
            "pc.shard(batches, mesh) takes any iterable, which every rank reads whole"
        )
    replicas = mesh.line_of_dp("ep").size
    if batch < max(replicas, 1):
        raise UsageError(
            f"loader: a batch of {batch} samples is smaller than the {replicas} replicas: make "
            "batches larger, or the mesh smaller"
        )
    if not len(dataset):
        raise UsageError("loader: the dataset has no samples")
    if collate is None:
        from torch.utils.data import default_collate

        collate = default_collate
    return Loader(dataset, batch, mesh, seed=seed, collate=collate, prefetch=prefetch)


__all__ = ["Loader", "loader"]
