"""Which rank maps which shard: equal shares, or one shard after the other, on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from pycoll import threads
from pycoll.communicator import Communicator
from pycoll.errors import Error
from pycoll.parallel.core import parcels
from pycoll.parallel.core.placement import share

_FOREVER_S = 1e6  # rank 0 may not be asked for as long as a shard takes
_NEXT, _STOP = 0, 1


class Source(Protocol):
    """Numbers of the shards that this rank maps. A context: its end is the end of the map."""

    def __iter__(self) -> Iterator[int]: ...

    def stop(self) -> None:
        """No rank gets another shard, if that can be; the caller asks no more."""

    def __enter__(self) -> Source: ...

    def __exit__(self, *error: Any) -> None: ...


def map_shards(
    fn: Callable[[int], Any], count: int, comm: Communicator, *, dynamic: bool
) -> tuple[dict[int, Any], list[int]]:
    """Calls `fn(i)` once for each i from 0 to count - 1, on one of the ranks. Collective.

    Args:
        fn: Maps a shard, by its number.
        count: Number of shards.
        comm: The ranks.
        dynamic: A rank gets its next shard when it has mapped one; otherwise each rank has an equal
            share of consecutive shards.

    Returns:
        The results of this rank by the number of the shard, in rising order, and for each shard
        the rank that mapped it.

    Raises:
        Exception: What `fn` raised on this rank.
        Error: `fn` raised on another rank; the message names shard and rank.

    Cost: one all_reduce of count + 1 numbers; if dynamic, a split, and two small messages a shard.
    """
    source: Source = _Dispenser(count, comm) if dynamic and comm.size > 1 else _Share(count, comm)
    mapped: dict[int, Any] = {}
    failure: Exception | None = None
    owners = np.full(count + 1, -1)  # the last one: the rank that failed
    with source:
        for i in source:
            try:
                mapped[i] = fn(i)
            except Exception as error:
                failure, owners[count] = error, comm.rank
                source.stop()
                break
        owners[list(mapped)] = comm.rank
        try:
            comm.all_reduce(owners, "max")
        except Error as broken:
            if failure is not None:
                raise failure from broken
            raise
    if (failed := int(owners[count])) >= 0:
        text = f"map_reduce: shard {i} failed on rank {comm.rank}: {failure!r}" if failure else ""
        text = parcels.broadcast(text, failed, comm)
        raise failure or Error(text)
    return mapped, owners[:count].tolist()


class _Share:
    """The consecutive shards of this rank."""

    def __init__(self, count: int, comm: Communicator) -> None:
        self._numbers = range(*share(count, comm.size, comm.rank))

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def stop(self) -> None:
        """See Source. The other ranks have their shares already."""

    def __enter__(self) -> _Share:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _Dispenser:
    """Numbers 0, 1, 2, ... for all ranks, on demand: a thread of rank 0 answers the others."""

    def __init__(self, count: int, comm: Communicator) -> None:
        self._count, self._next, self._lock = count, 0, threading.Lock()
        desk = comm.split(0)  # the thread's own: the caller's may be used meanwhile
        assert desk is not None
        self._desk = desk
        self._thread: threading.Thread | None = None
        if comm.rank == 0:
            desk.timeout_s = _FOREVER_S
            self._thread = threading.Thread(target=self._answer_all, daemon=True)
            threads.start(self._thread, "the thread that hands out shards")

    def __iter__(self) -> Iterator[int]:
        while (number := self._take() if self._thread else self._ask(_NEXT)) < self._count:
            yield number

    def stop(self) -> None:
        """See Source."""
        if self._thread:
            self._take_all()
        else:
            self._ask(_STOP)

    def __enter__(self) -> _Dispenser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._desk.abort(f"map_reduce: {error!r}")
        if self._thread:
            self._thread.join()
        self._desk.close()

    def _take(self) -> int:
        with self._lock:
            number, self._next = self._next, min(self._next + 1, self._count)
        return number

    def _take_all(self) -> None:
        with self._lock:
            self._next = self._count

    def _ask(self, question: int) -> int:
        self._desk.send(np.array([question]), 0)
        return int(self._desk.recv(np.zeros(1, np.int64), 0)[0])

    def _answer_all(self) -> None:
        """Answers until each other rank has been told that there is no shard left."""
        question = np.zeros(1, np.int64)
        left = self._desk.size - 1
        try:
            while left:
                rank = self._desk.recv_any(question)
                if question[0] == _STOP:
                    self._take_all()
                number = self._take()
                left -= number == self._count
                self._desk.send(np.array([number]), rank)
        except Error:
            pass  # a rank has ended or given up: every rank's next call raises it


__all__ = ["map_shards"]
