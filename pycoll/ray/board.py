"""The board: an actor that keeps addresses for ranks that Ray has restarted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

_HEAD = "node:__internal_head__"  # a resource that Ray gives to the head node


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
    """Starts a board on the head node, without which Ray cannot restart an actor either.

    Actors find it by `ray.get_actor(name)` and not by its handle, which Ray would keep in the
    object store: a rank can be restarted only while the arguments of its constructor exist.
    """
    options: dict[str, Any] = {"num_cpus": 0, "resources": {_HEAD: 0.001}, "name": name}
    return ray.remote(**options)(Board).remote()


__all__ = ["Board", "make_board"]
