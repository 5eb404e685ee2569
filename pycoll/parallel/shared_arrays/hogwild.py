"""HOGWILD!: processes step shared arrays at the same time, without waiting for each other."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycoll import _core
from pycoll.communicator import Communicator
from pycoll.errors import UsageError
from pycoll.launch import run_ranks
from pycoll.parallel.core.placement import share

LOCKS: dict[str | None, int] = {None: 0, "atomic": 1, "mutex": 2}


@dataclass(frozen=True, slots=True)
class SharedWorker:
    """A process that steps the shared arrays.

    Attributes:
        rank: Its number.
        size: Number of workers.
        shared: The arrays, which all workers change.
        lock: "atomic", "mutex" or None.
        comm: The workers; for example, `comm.barrier()` ends an epoch of all.
    """

    rank: int
    size: int
    shared: Mapping[str, Tensor]
    lock: str | None
    comm: Communicator
    _mutex: Tensor

    def order(self, count: int, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
        """This worker's share of the examples, in a random order that each seed changes.

        Args:
            count: Number of examples.
            seed: For example, the number of the epoch.
            groups: [count] ints of 0 or more: examples of one group go to the same worker. With the
                users of ratings as groups, no other worker changes the factors of this one's users.

        Returns:
            Numbers of examples, int64: without groups, a part of a random order of all; with groups
            the same ones for each seed, of neighboring groups.

        Cost: a random order of all examples, or a count of the groups.
        """
        random = np.random.default_rng(seed)
        if groups is None:
            start, stop = share(count, self.size, self.rank)
            return random.permutation(count)[start:stop]
        sizes = np.bincount(groups, minlength=1)
        middles = np.cumsum(sizes) - sizes / 2
        owners = np.minimum(middles * self.size // max(count, 1), self.size - 1)
        return random.permutation(np.flatnonzero(owners[groups] == self.rank))

    def factorize(
        self,
        users: np.ndarray,
        items: np.ndarray,
        ratings: np.ndarray,
        *,
        mean: float,
        rate: float,
        l2: float = 0.0,
        names: tuple[str, str] = ("users", "items"),
    ) -> float:
        """Steps the factors of a matrix by each rating in turn, in compiled code.

        A rating is mean + biases + the product of both factors; its loss is half of the squared
        error, plus l2 / 2 times the squares of what it touches.

        Args:
            users: [n] int32.
            items: [n] int32.
            ratings: [n] float32.
            mean: Mean of all ratings.
            rate: Learning rate.
            l2: Weight of the penalty.
            names: Names of the shared factors, [users, dim + 1] and [items, dim + 1] float32, with
                the bias as the last element.

        Returns:
            Sum of the squared errors before each step.

        Raises:
            UsageError: An array has another dtype or shape, or there is no such user or item.

        Cost: 8 dim flops a rating; "mutex" locks for each rating, "atomic" adds by a locked
            instruction for each element. Workers pass the cache lines of factors to each other: it
            is faster if dim + 1 is a multiple of 8.
        """
        of_users, of_items = (self.shared[name] for name in names)
        lock = LOCKS[self.lock]
        return _core._factorize(
            of_users, of_items, users, items, ratings, mean, rate, l2, lock, self._mutex
        )

    def step_logistic(
        self,
        starts: np.ndarray,
        features: np.ndarray,
        values: np.ndarray,
        labels: np.ndarray,
        order: np.ndarray,
        *,
        rate: float,
        name: str = "weights",
    ) -> float:
        """Steps a logistic regression by examples in turn, in compiled code.

        Args:
            starts: Features of example e are at [starts[e], starts[e + 1]), [n + 1] int64.
            features: Their numbers, int32.
            values: Their values, float32.
            labels: 0 or 1, [n] float32.
            order: Examples to step by, int64.
            rate: Learning rate.
            name: Name of the shared weights, [features] float32.

        Returns:
            Sum of the losses before each step, nats.

        Raises:
            UsageError: An array has another dtype or shape, or there is no such feature.

        Cost: 4 flops for each feature of an example, and the lock as in `factorize`.
        """
        weights, lock = self.shared[name], LOCKS[self.lock]
        return _core._step_logistic(
            weights, starts, features, values, labels, order, rate, lock, self._mutex
        )


@dataclass(frozen=True, slots=True)
class HogwildRun:
    """What workers have done.

    Attributes:
        shared: The arrays after the last step.
        results: What the function returned, by worker.
        seconds: Time from the moment at which all workers had started to the end of the last one.
    """

    shared: dict[str, Tensor]
    results: list[Any]
    seconds: float


def hogwild(
    fn: Callable[[SharedWorker], Any],
    shared: Mapping[str, Tensor],
    workers: int = 2,
    lock: str | None = None,
) -> HogwildRun:
    """Runs a function in several processes that change the same arrays.

    Args:
        fn: Gets a `SharedWorker`, and steps `worker.shared`, by `factorize`, `step_logistic` or
            operations of its own. Processes are forked: it may use what the caller has loaded.
        shared: CPU tensors by name; they are copied to shared memory, and not changed.
        workers: Number of processes.
        lock: What protects updates in compiled code. None: nothing. "atomic": each element is
            added to atomically. "mutex": one update at a time.

    Returns:
        The arrays and the results.

    Raises:
        UsageError: There is no such lock, no worker, or no array.
        Others: The first error of a worker.

    Cost: a fork for each worker; no message while they work.

    Source: Niu et al. 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
        Descent", NeurIPS.
    """
    if lock not in LOCKS:
        raise UsageError(f"hogwild: lock={lock!r}, expected None, 'atomic' or 'mutex'")
    if workers < 1 or not shared:
        raise UsageError(
            f"hogwild: {workers} workers and {len(shared)} arrays, expected one or more of each"
        )
    arrays = {name: _shared(x) for name, x in shared.items()}
    mutex = _shared(torch.zeros(_core._mutex_bytes, dtype=torch.uint8))
    _core._make_mutex(mutex)

    def work(comm: Communicator) -> tuple[Any, float]:
        worker = SharedWorker(comm.rank, comm.size, arrays, lock, comm, mutex)
        comm.barrier()
        begun_s = time.monotonic()
        result = fn(worker)
        comm.barrier()
        return result, time.monotonic() - begun_s

    outcomes = run_ranks(work, workers)
    return HogwildRun(
        arrays, [result for result, _ in outcomes], max(seconds for _, seconds in outcomes)
    )


def _shared(x: Tensor) -> Tensor:
    """A copy in memory that processes forked later share; it has no name, and none is left over."""
    memory = mmap.mmap(-1, max(x.nbytes, 1))
    made = torch.frombuffer(memory, dtype=x.dtype, count=x.numel()) if x.numel() else x.clone()
    return made.view(x.shape).copy_(x)


__all__ = ["LOCKS", "HogwildRun", "SharedWorker", "hogwild"]
