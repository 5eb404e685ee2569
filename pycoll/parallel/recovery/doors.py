"""The addresses at which new ranks wait for the next commit of an elastic training."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

import pycoll
from pycoll.communicator import Communicator
from pycoll.elastic.owner_port import host_and_port
from pycoll.elastic.resize import Door
from pycoll.errors import AbortedError, PeerDiedError, SystemError, UsageError

_AGAIN_S = 0.02  # after which a newcomer knocks again
_OLD_DOOR_S = 5.0  # in which the system ends a process that was killed, and its sockets
_ANSWER_S = 1.0  # in which a host that is there takes a connection


def addresses_in(text: str | None) -> list[str]:
    """The addresses in "host:port,host:port".

    Raises:
        UsageError: One of them is invalid.
    """
    found = [address.strip() for address in (text or "").split(",") if address.strip()]
    for address in found:
        host_and_port(address)
    return found


def opened(addresses: Sequence[str], is_first: bool) -> Door:
    """The door at the first address at which this host can listen.

    Args:
        addresses: One or more.
        is_first: No rank has listened there before: do not wait until an old rank 0 has ended.

    Raises:
        SystemError: This host cannot listen at any of them.
    """
    end_s = time.monotonic() + (0.0 if is_first else _OLD_DOOR_S)
    while True:
        for address in addresses:
            try:
                return Door(address)
            except SystemError as error:
                failure = error
        if time.monotonic() > end_s:
            raise failure
        time.sleep(_AGAIN_S)  # the old rank 0 is still ending


def agreed_address(base: Communicator, addresses: Sequence[str], door: Door | None) -> str:
    """The address of rank 0's door. Collective."""
    at = 0 if door is None else addresses.index(door.address)
    return addresses[int(base.broadcast(np.array([at]), 0)[0])]


def joined(addresses: Sequence[str], timeout_s: float) -> Communicator:
    """Waits at the address where rank 0 listens, until it takes this process in.

    Raises:
        UsageError: There is no address.
        TimeoutError: No rank listens at any of them.
    """
    if not addresses:
        raise UsageError(
            "elastic: a new rank needs the address at which the others take it in: "
            "address='host:port', or PYCOLL_ELASTIC"
        )
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = end_s - time.monotonic()
        address = _answering(addresses)
        try:
            if address or left_s < _AGAIN_S:
                return pycoll.join(address or addresses[0], max(left_s, 1.0))
        except (PeerDiedError, AbortedError, UsageError):  # others were faster, or rank 0 ended
            if left_s < _AGAIN_S:
                raise
        time.sleep(_AGAIN_S)


def _answering(addresses: Sequence[str]) -> str:
    """The first address at which a process listens; empty if there is none, now."""
    if len(addresses) == 1:
        return addresses[0]  # `pycoll.join` waits until a process listens there
    for address in addresses:
        with suppress(OSError), socket.create_connection(host_and_port(address), _ANSWER_S):
            return address
    return ""


__all__ = ["addresses_in", "agreed_address", "joined", "opened"]
