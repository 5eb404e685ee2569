"""The parts of an elastic training on the ranks that are there now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import nn

from pycoll.communicator import Communicator
from pycoll.elastic.resize import Door
from pycoll.errors import UsageError
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.recovery.copies import Copies, holding
from pycoll.parallel.recovery.laps import Laps
from pycoll.parallel.recovery.snapshots import Snapshots
from pycoll.parallel.recovery.survivors import GOES_ON
from pycoll.parallel.recovery.takeover import Takeover
from pycoll.parallel.trainer.optimizers import Optimizer
from pycoll.parallel.trainer.owner import trainer_of
from pycoll.parallel.trainer.saved_objects import RNG, Objects
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
        restart_s: Seconds of the parts of the start or restart that led to this job: "shrink" or
            "grow", "mesh", "build", "restore" and "copies"; "takeover" and "rest of the step", if
            other replicas finished the step.
        failed_s: When it began, on CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        base: Communicator,
        mesh: Mesh,
        build: Build,
        snapshots: Snapshots,
        laps: Laps,
        *,
        copies: int,
        door: Door | None,
        most: int | None,
    ) -> None:
        """Builds the objects; `begin` follows. Collective.

        Args:
            base: The ranks.
            mesh: Their mesh.
            build: See `elastic`.
            snapshots: The copies of this rank.
            laps: Times of the restart.
            copies: Number of ranks that may end at once.
            door: Where newcomers wait, on rank 0.
            most: Largest number of ranks; None: any.

        Raises:
            UsageError: `build` returned something else than it must.
        """
        self.mesh, self.commits = mesh, 0
        self.restart_s, self.failed_s = laps.seconds, laps.began_s
        self._base, self._snapshots, self._door, self._most = base, snapshots, door, most
        self._objects = _checked(build(mesh))
        self._model = self._objects["model"]
        self._optimizer = self._objects.get("optimizer")
        self._others: Objects = {
            name: one for name, one in self._objects.items() if name not in ("model", "optimizer")
        }
        self._trainer = trainer_of(self._model)
        self._num_copies, self._at_end = copies, ExitStack()
        if self._optimizer is not None:
            self._at_end.callback(self._optimizer.abort, GOES_ON)
        is_possible = self._trainer.mesh is mesh and Takeover.is_possible(self._trainer)
        self._takeover = Takeover(base, self._trainer) if is_possible else None
        laps.end("build")

    def begin(self, laps: Laps) -> None:
        """Gives the objects the state that the ranks have, and copies it. Collective.

        Raises:
            Error: The ranks have too few copies of the state.
        """
        holdings = self._restore()
        laps.end("restore")
        self._copies = Copies(self.mesh.world, holdings, self._num_copies)
        self._at_end.callback(self._copies.close, GOES_ON)
        self._can_hold = (
            self._optimizer is not None
            and self._copies.are_everywhere
            and self._trainer.policy.steps_alone
            and not any(isinstance(one, RNG) for one in self._others.values())
        )
        self._number, self._num_new, self._holds_next = -1, 0, False
        self._was_in_use = False  # the newest generation of any rank, when they met
        if self._optimizer is not None:
            self._optimizer.before_change = self._before_change
        self._meet()
        if self._can_hold and self._snapshots.holds:
            self._number += 1
            self._snapshots.hold(self._number, self._held, self._described())
        else:
            self._take()
            if self._was_in_use and not self._can_hold:
                self.finish()  # before it ends, all ranks must have the copies that are sent
        laps.end("copies")

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
        of the servers, so that each can be the copy of another. `update` does the optimizer's
        step, too, and is cheaper.

        Raises:
            Error: A rank has ended; `elastic` goes on without it.

        Cost: an all_reduce of two numbers; a copy of this rank's share of the state; with
            `replicas=`, also an all_reduce of the weights or a pull.
        """
        self.commits += 1
        if self._optimizer is not None:
            self._optimizer.meet()
        if self.has_taken_over:
            assert self._takeover is not None
            self._snapshots.hold_part(self._number + 1, self._held, self._described())
            raise self._takeover.regrouped()
        self._meet()
        self._take()
        self._take_in()

    def update(self, *then: Callable[[], Any]) -> float:
        """Steps the optimizer, calls the functions, and commits. Collective.

        Where each rank has the whole state, as with zero=0 on a mesh of replicas, nothing is
        copied: what is in use is whole on each survivor, before the optimizer's step or after the
        functions, because nothing in between waits for other ranks.

        Args:
            then: Functions without arguments that belong to the step, such as `scheduler.step` and
                `ema.update`. They, and `state_dict` of the job's objects, must not communicate, and
                nothing else may change weights.

        Returns:
            The norm of all gradients, as the optimizer's step does.

        Raises:
            UsageError: `build` returned no optimizer.
            Error: A rank has ended; `elastic` goes on without it.

        Cost: an all_reduce of two numbers, and a copy of the model's buffers; that of `commit`
            where a rank has a part of the state only, or if there is an RNG among the objects.
        """
        if self._optimizer is None:
            raise UsageError("elastic: job.update steps the optimizer, and build returned none")
        self._holds_next = self._can_hold
        try:
            norm = self._optimizer.step()
            for function in then:
                function()
            if not self._can_hold:
                self.commit()
                return norm
            self.commits += 1
            self._number += 1
            self._snapshots.hold(self._number, self._held, self._described())
        finally:
            self._holds_next = False
        self._meet()
        self._take_in()
        return norm

    @property
    def base(self) -> Communicator:
        """The ranks; within a step from which some have ended, those that are left."""
        return self._base if self._takeover is None else self._takeover.base

    @property
    def has_taken_over(self) -> bool:
        """Whether the running step goes on without ranks that have ended."""
        return self._takeover is not None and self._takeover.has_finished

    @property
    def num_waiting(self) -> int:
        """Number of new ranks that wait to be taken in, on rank 0; 0 on other ranks."""
        return 0 if self._door is None else self._door.num_waiting()

    def finish(self) -> None:
        """Waits until all ranks have all copies and no longer need the mesh. Collective."""
        self._snapshots.settle()
        self._base.barrier()

    def close(self) -> None:
        """Ends what ranks exchange in the background; a rank that waits for it raises an error."""
        self._at_end.close()

    def _before_change(self) -> None:
        self._snapshots.before_change(holds_next=self._holds_next)

    def _meet(self) -> None:
        """Waits until all ranks have all copies, and agrees on the next number. Collective."""
        self._snapshots.settle()
        snapshots = self._snapshots
        waiting = np.array([self.num_waiting, snapshots.number, snapshots.is_in_use], np.int64)
        self._base.all_reduce(waiting, "max")
        self._num_new = int(waiting[0])
        if self._most is not None:
            self._num_new = min(self._num_new, max(self._most - self._base.size, 0))
        self._number, self._was_in_use = int(waiting[1]), bool(waiting[2])

    def _take(self) -> None:
        """Copies the state, after `_meet`."""
        self._number += 1
        self._snapshots.take(self._number, self._held(), self._described(), self._copies)

    def _take_in(self) -> None:
        """Leaves the user's loop if new ranks wait."""
        if self._num_new:
            self.finish()
            raise NewRanks(self._num_new)

    def _described(self) -> dict[str, Any]:
        described = description(self._trainer, self._optimizer, self._others)
        return {**described, "commits": self.commits}

    def _restore(self) -> list[tuple[dict[str, Any], int]]:
        """Gives the objects the ranks' state; returns what each rank holds, and its host."""
        buffers = {f"buffer:{name}" for name, _ in self._model.named_buffers()}
        needed = buffers | set(self._trainer.placements)
        mine = holding(self._held()), self.mesh.world.host_number
        state = self._snapshots.restore(self.mesh.world, needed, mine)
        if state.number >= 0:
            install(self._trainer, self._optimizer, self._others, state.described, state)
            self._trainer.reducer.publish()
            self._trainer.clear()
            self.commits = state.described["commits"]
        return state.of_ranks

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
