"""The parts of an elastic training on the ranks that are there now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from pycoll.communicator import Communicator
from pycoll.elastic.resize import Door
from pycoll.errors import Error, UsageError
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.recovery.copies import Copies
from pycoll.parallel.recovery.snapshots import Snapshots
from pycoll.parallel.trainer.optimizers import Optimizer
from pycoll.parallel.trainer.owner import trainer_of
from pycoll.parallel.trainer.saved_objects import Objects
from pycoll.parallel.trainer.training_state import description, held_state, install
from pycoll.parallel.trainer.weight_average import EMA

Build = Callable[[Mesh], Mapping[str, Any]]


class NewRanks(BaseException):
    """Leaves the user's loop, because new ranks wait at the door."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Job:
    """What `train` gets: the objects that `build` made for the ranks that are there now.

    They are attributes: `job.model`, `job.optimizer`, `job.loader`.

    Attributes:
        mesh: The ranks.
        commits: Number of commits since the training began, on any ranks.
    """

    def __init__(
        self,
        base: Communicator,
        mesh: Mesh,
        build: Build,
        snapshots: Snapshots,
        *,
        copies: int,
        door: Door | None,
        most: int | None,
    ) -> None:
        """Builds the objects, and gives them the state that the ranks have. Collective.

        Args:
            base: The ranks.
            mesh: Their mesh.
            build: See `elastic`.
            snapshots: The copies of this rank.
            copies: Number of ranks that may end at once.
            door: Where newcomers wait, on rank 0.
            most: Largest number of ranks; None: any.

        Raises:
            UsageError: `build` returned something else than it must.
            Error: The ranks have too few copies of the state.
        """
        self.mesh, self.commits = mesh, 0
        self._base, self._snapshots, self._door, self._most = base, snapshots, door, most
        self._objects = _checked(build(mesh))
        self._model = self._objects["model"]
        self._optimizer = self._objects.get("optimizer")
        self._others: Objects = {
            name: one for name, one in self._objects.items() if name not in ("model", "optimizer")
        }
        self._trainer = trainer_of(self._model)
        self._restore()
        self._copies = Copies(mesh.world, self._held(), copies)
        self._take()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_objects"][name]
        except KeyError:
            known = ", ".join(self.__dict__.get("_objects", {}))
            raise AttributeError(f"the job has no {name!r}; build returned {known}") from None

    def commit(self) -> None:
        """Ends a step: its result is safe if as many ranks end as there are copies. Collective.

        Call it after the optimizer's step, where a save would be right. Copies go to other ranks
        while the next step computes. If new ranks wait, they are taken in: `train` is left then,
        and called again. With `replicas=`, all replicas take the mean of their weights, or those
        of the servers, so that each can be the copy of another.

        Raises:
            Error: A rank has ended; `elastic` goes on without it.

        Cost: an all_reduce of one number; a copy of this rank's share of the state; with
            `replicas=`, also an all_reduce of the weights or a pull.
        """
        self.commits += 1
        if self._optimizer is not None:
            self._optimizer.meet()
        self._take()
        if self._num_new:
            self.finish()
            raise NewRanks(self._num_new)

    @property
    def num_waiting(self) -> int:
        """Number of new ranks that wait to be taken in, on rank 0; 0 on other ranks."""
        return 0 if self._door is None else self._door.num_waiting()

    def finish(self) -> None:
        """Waits until all ranks have all copies and no longer need the mesh. Collective."""
        self._snapshots.settle()
        self._base.barrier()

    def close(self) -> None:
        """Ends the transfers of copies."""
        self._copies.close()

    def _take(self) -> None:
        self._snapshots.settle()
        waiting = np.array([self.num_waiting, self._snapshots.number], np.int64)
        self._base.all_reduce(waiting, "max")
        self._num_new = int(waiting[0])
        if self._most is not None:
            self._num_new = min(self._num_new, max(self._most - self._base.size, 0))
        described = description(self._trainer, self._optimizer, self._others)
        described["commits"] = self.commits
        self._snapshots.take(int(waiting[1]) + 1, self._held(), described, self._copies)

    def _restore(self) -> None:
        buffers = {f"buffer:{name}" for name, _ in self._model.named_buffers()}
        needed = buffers | set(self._trainer.placements)
        state = self._snapshots.restore(self._base, needed)
        if state is None:
            if self._snapshots.number < 0 and not self._is_late():
                return
            raise Error(
                "elastic: more ranks ended at once than there are copies of the state: start "
                "again from a checkpoint of pc.save, and take copies=2 or more"
            )
        install(self._trainer, self._optimizer, self._others, state.described, state)
        self._trainer.reducer.publish()
        self._trainer.clear()
        self.commits = state.described["commits"]

    def _is_late(self) -> bool:
        """Whether another rank has copies."""
        newest = np.array([self._snapshots.number], np.int64)
        return bool(self._base.all_reduce(newest, "max")[0] >= 0)

    def _held(self) -> list[Any]:
        return list(held_state(self._trainer, self._optimizer, self._others))


def _checked(built: Any) -> dict[str, Any]:
    """What `build` returned, if all of it can move to other ranks."""
    if not isinstance(built, Mapping) or not isinstance(built.get("model"), nn.Module):
        raise UsageError(
            f"elastic: build returned {type(built).__name__}, expected a dict such as "
            '{"model": pc.parallelize(...), "optimizer": pc.optimizer(...), "loader": ...}'
        )
    for name, one in built.items():
        if name == "optimizer" and not isinstance(one, Optimizer):
            raise UsageError(
                f"elastic: the optimizer is a {type(one).__name__}, expected one that pc.optimizer "
                "returned: the state of others cannot move"
            )
        if not isinstance(one, EMA) and not hasattr(one, "state_dict"):
            raise UsageError(
                f"elastic: build returned {name!r}, a {type(one).__name__} without state_dict and "
                "load_state_dict: its state cannot move to other ranks (pc.loader has one)"
            )
    return dict(built)


__all__ = ["Build", "Job", "NewRanks"]
