"""The actor of a rank: joins the world and calls functions with the job."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray

import pycoll
from pycoll.elastic.owner_port import free_address, host_and_port
from pycoll.errors import AbortedError, PeerDiedError
from pycoll.ray.job import Job, Place


class RankActor:
    """A process that holds one rank. After a restart by Ray, it rejoins at its next call."""

    def __init__(self, place: Place, board: str, token: str) -> None:
        os.environ["PYCOLL_TOKEN"] = token
        self._place, self._board = place, ray.get_actor(board)
        self._job: Job | None = None

    def address(self) -> str:
        """An address of this node, free now."""
        return free_address(ray.util.get_node_ip_address())

    def connect(self, address: str) -> str:
        """Joins the other ranks; returns the id of this node."""
        host, port = host_and_port(address)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = (
            str(self._place.actor),
            str(self._place.num_actors),
        )
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        comm = pycoll.init(self._place.timeout_s)
        self._job = Job(comm, self._place, self._board)
        return str(ray.get_runtime_context().get_node_id())

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Calls `fn(job, *args)`. An exception ends the calls of the other ranks, too."""
        if self._job is None:
            self._job = Job(None, self._place, self._board)
        try:
            return fn(self._job, *args)
        except (PeerDiedError, AbortedError):
            raise
        except BaseException as error:
            self._job.abort(f"actor {self._place.actor} raised {error!r}")
            raise
        finally:
            self._job.is_restarted = False


__all__ = ["RankActor"]
