"""The board: an actor that keeps addresses for ranks that Ray has restarted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Board:
    """The world's addresses, and invitations to actors; each of these is taken at most once."""

    def __init__(self) -> None:
        self._addresses: list[str] = []
        self._invitations: dict[int, str] = {}

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Keeps an address of each actor."""
        self._addresses = list(addresses)

    def addresses(self) -> list[str]:
        """What `set_addresses` kept."""
        return self._addresses

    def invite(self, actors: Sequence[int], address: str) -> None:
        """Leaves "host:port", where a world takes newcomers, for some actors."""
        self._invitations.update(dict.fromkeys(actors, address))

    def take(self, actor: int) -> str | None:
        """Returns the last invitation of an actor, and removes it."""
        return self._invitations.pop(actor, None)


def make_board(name: str) -> Any:
    """Starts a board on the node of the caller; actors find it by `ray.get_actor(name)`.

    By its name and not by its handle, which Ray would keep in the object store: a rank can be
    restarted only while the arguments of its constructor exist.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": -1, "name": name, "scheduling_strategy": here}
    return ray.remote(**options)(Board).remote()


__all__ = ["Board", "make_board"]
