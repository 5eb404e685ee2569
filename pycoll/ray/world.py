"""A world of ranks in a Ray cluster, as its driver sees it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pycoll.arguments import flag, seconds, shown, whole_number
from pycoll.errors import AbortedError, PeerDiedError, TimeoutError, UsageError
from pycoll.ray.board import make_board
from pycoll.ray.job import Place
from pycoll.ray.placement import Role, bundles_by_node, place, roles_of
from pycoll.ray.rank_actor import RankActor

_ECHOES_S = 5.0  # time for the other ranks to fail after one has
_MOST_RESTARTS = (1 << 31) - 1


def start(
    ranks: int | Role | Mapping[str, int | Role],
    *,
    strategy: str = "PACK",
    max_restarts: int = 0,
    timeout_s: float = 60.0,
) -> World:
    """Starts ranks as actors of Ray, and connects them by pycoll.

    Ray places them by one placement group, and carries rank 0's address and a new secret to all
    ranks. The nodes need the same pycoll, and networks that `pycoll.init` uses between hosts.

    Args:
        ranks: Number of ranks with a CPU each, or a Role, or the roles by name. Ranks are numbered
            in the order of the roles.
        strategy: Ray's: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        max_restarts: How often Ray restarts a rank that died; -1: always.
        timeout_s: Seconds in which the ranks must find a place, and in which they must connect;
            also the deadline of every later operation.

    Returns:
        The world. As a context manager it closes itself at the end.

    Raises:
        UsageError: An argument is invalid, or Ray is not initialized.
        TimeoutError: The cluster has no room for the ranks.
        Others: As `pycoll.init`.

    Cost: one process for each rank: a second or more, by Ray.
    """
    roles = roles_of(ranks)
    whole_number(max_restarts, "start: max_restarts", -1, _MOST_RESTARTS)
    timeout_s = seconds(timeout_s)
    if not ray.is_initialized():
        raise UsageError("start: Ray is not initialized: call ray.init() before")
    world = World(roles, place(roles, strategy, timeout_s), max_restarts, timeout_s)
    try:
        world._connect()
    except BaseException:
        world.close()
        raise
    return world


class World:
    """Ranks that run functions together. Made by `start`.

    Attributes:
        roles: The roles by name, in the order of their ranks.
        actors: Ray's handles of the ranks' actors.
        nodes: Ids of the nodes where the ranks started.
    """

    def __init__(
        self, roles: dict[str, Role], group: Any, max_restarts: int, timeout_s: float
    ) -> None:
        self.roles, self._group, self._timeout_s = roles, group, timeout_s
        board, token = f"pycoll-board-{secrets.token_hex(8)}", secrets.token_hex(16)
        self._board = make_board(board)
        names = [name for name, role in roles.items() for _ in range(role.count)]
        self._names, self.nodes = names, [""] * len(names)
        self.actors = [
            self._actor(roles[name], bundle, max_restarts).remote(
                Place(i, name, len(names), max_restarts != 0, timeout_s), board, token
            )
            for i, (name, bundle) in enumerate(
                zip(names, bundles_by_node(group, roles), strict=True)
            )
        ]

    def _actor(self, role: Role, bundle: int, max_restarts: int) -> Any:
        return ray.remote(
            num_cpus=role.num_cpus,
            num_gpus=role.num_gpus,
            resources=dict(role.resources),
            max_restarts=max_restarts,
            # Ray calls `run` again on a restarted actor, which is how it comes back to the job.
            max_task_retries=-1 if max_restarts else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
        )(RankActor)

    def _connect(self) -> None:
        deadline_s = 2 * self._timeout_s  # processes that begin, and pycoll.init
        addresses = self._collected("address", deadline_s)
        ray.get(self._board.set_addresses.remote(addresses), timeout=deadline_s)
        # Not one of these: they stay free for servers of the script.
        store = ray.get(self.actors[0].address.remote(), timeout=deadline_s)
        self.nodes = self._collected("connect", deadline_s, store)

    def _collected(self, method: str, deadline_s: float, *args: Any) -> list[Any]:
        """What a method of all actors returns."""
        calls = [getattr(actor, method).remote(*args) for actor in self.actors]
        return self._results(calls, "start", deadline_s, return_errors=False)

    def run(
        self,
        fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        *args: Any,
        timeout_s: float | None = None,
        return_errors: bool = False,
    ) -> list[Any]:
        """Calls `fn(job, *args)` on every rank and waits for all of them.

        A rank that Ray restarts calls `fn` again, from its beginning, as soon as the others have
        called `job.recover()`. An exception on one rank ends the operations of all ranks.

        Args:
            fn: Function of a Job, or one for each role by its name; sent by Ray's pickle.
            *args: Passed to `fn`; arrays may be references of Ray.
            timeout_s: Seconds in which all ranks must return; None: no limit other than the
                deadlines of the ranks' own operations.
            return_errors: Return the exception of a failed rank in place of its result.

        Returns:
            The results, in the order of the actors.

        Raises:
            UsageError: `fn` is no function, or lacks a role.
            TimeoutError: A rank did not return in time; the message names it.
            PeerDiedError: A rank died, and Ray does not restart it.
            Exception: What `fn` raised, of its own type: the first exception that is not a
                consequence of another rank's end.
        """
        functions = dict(fn) if isinstance(fn, Mapping) else dict.fromkeys(self.roles, fn)
        if functions.keys() != self.roles.keys() or not all(map(callable, functions.values())):
            raise UsageError(
                f"run: fn is {shown(fn)}, expected a function, or one for each role: "
                f"{', '.join(self.roles)}"
            )
        limit_s = None if timeout_s is None else seconds(timeout_s)
        values = ray.put(args)
        calls = [
            actor.run.remote(functions[name], values)
            for actor, name in zip(self.actors, self._names, strict=True)
        ]
        return self._results(calls, "run", limit_s, flag(return_errors, "return_errors"))

    def close(self) -> None:
        """Ends all ranks and gives their resources back to Ray."""
        for actor in (*self.actors, self._board):
            ray.kill(actor)  # and no restart
        remove_placement_group(self._group)

    def _results(
        self, calls: list[Any], what: str, limit_s: float | None, return_errors: bool
    ) -> list[Any]:
        """The results of calls in their order; raises the first failure that is no echo."""
        end_s = None if limit_s is None else time.monotonic() + limit_s
        left, results = list(calls), [None] * len(calls)
        failures: list[Exception] = []
        while left:
            wait_s = None if end_s is None else max(end_s - time.monotonic(), 0.0)
            done, left = ray.wait(left, timeout=wait_s)
            if not done:
                if failures:
                    break
                late = ", ".join(str(calls.index(call)) for call in left)
                raise TimeoutError(f"{what}: rank {late} did not return within {limit_s:g} s")
            number = calls.index(done[0])
            results[number] = found = self._outcome(done[0], number, what)
            if isinstance(found, Exception) and not return_errors:
                failures.append(found)
                end_s = min(end_s or float("inf"), time.monotonic() + _ECHOES_S)
        if failures:
            raise min(failures, key=lambda e: isinstance(e, (PeerDiedError, AbortedError)))
        return results

    def _outcome(self, call: Any, number: int, what: str) -> Any:
        """The result of a call, or the exception that it raised."""
        try:
            return ray.get(call)
        except RayActorError as error:
            text = f"{what}: rank {number} on node {self.nodes[number][:8] or '?'} died: "
            return PeerDiedError(text + str(error).partition("\n")[0], number)
        except RayTaskError as error:
            return error

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


__all__ = ["World", "start"]
