"""New worlds from old ones: without failed ranks (`shrink`), with newcomers (`grow`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pycoll import _core, environment
from pycoll.arguments import seconds, whole_number
from pycoll.elastic.agreement import ShrinkAgreement
from pycoll.elastic.messages import Verdict
from pycoll.elastic.owner_port import (
    OwnerPort,
    exchange_through,
    host_and_port,
    open_owner_port,
    owner_port_of,
)
from pycoll.errors import Error, PeerDiedError, TimeoutError, UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

_bootstrap = _core.bootstrap
_NEWCOMER = 1 << 20  # lower bound of newcomers' numbers, above all ranks
_POLL_S = 0.05
# Seconds that rank 0's store stays open after a failure, to report the reason.
_LAST_WORD_S = 2.0


def shrink(comm: Communicator, timeout_s: float | None) -> Communicator:
    """Makes a communicator of the surviving ranks of `comm`: see `Communicator.shrink`."""
    timeout_s = comm.timeout_s if timeout_s is None else seconds(timeout_s)
    end = time.monotonic() + timeout_s
    silence_s = float(environment.read("PYCOLL_SILENCE_S") or 5)
    port, left_s = owner_port_of(comm, "shrink"), timeout_s
    comm._announce_deaths()

    def has_died(rank: int) -> bool:
        try:
            comm._check_alive([port.origin[rank]])
        except PeerDiedError:
            return True
        return False

    with contextlib.ExitStack() as stack:

        def serve(token: str, host: str) -> int:
            server = _bootstrap.TcpStoreServer(host, 0, token, reports_deaths=True)
            stack.callback(server.stop, _LAST_WORD_S)
            return server.port

        while True:
            token = port.secret.hex()
            agreement = ShrinkAgreement(port, partial(serve, token), left_s, silence_s, has_died)
            verdict = port.server.run(agreement.verdict())
            # If a member ends before all have connected, some ranks may already use the new world.
            # So the next agreement, of this call or of theirs, is among its members.
            comm._owner_ports[-1] = port = port.of_members(
                verdict.ranks, verdict.ended, verdict.name
            )
            try:
                new = _connect_members(verdict, port, token, max(left_s, _LAST_WORD_S), comm)
            except PeerDiedError:
                if (left_s := end - time.monotonic()) <= 0:
                    raise
            else:
                return _replace(comm, new, port.origin)


def _connect_members(
    verdict: Verdict, port: OwnerPort, token: str, timeout_s: float, old: Communicator
) -> Communicator:
    from pycoll.communicator import Communicator

    if port.size == 1:
        return Communicator(_core.init_local(_core.make_local_world(1), 0, old.timeout_s))
    where = (verdict.host, verdict.port, token, port.rank, timeout_s)
    world = _World(port.rank, port.size, verdict.name, token)
    # The store's server goes when all have left.
    with contextlib.closing(_bootstrap.TcpStore(*where, old=old, members=port.origin)) as store:
        new = _connect(store, world, old.timeout_s, old, port.origin)
    new._owner_ports.append(port.joined())
    return new


class Door:
    """An address at which newcomers may come before the ranks of a world call `grow`.

    Rank 0 opens it. A newcomer calls `pycoll.join(address)`, and waits.

    Attributes:
        address: "host:port".
    """

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        """Listens at "host:port", as `grow` does.

        Raises:
            UsageError: The address is invalid.
            SystemError: This host cannot listen there.
        """
        self.address = address
        host, port = host_and_port(address)
        token, local = _session_token()
        self._server = _bootstrap.TcpStoreServer(host, port, token, local, reports_deaths=True)
        try:
            # Below all newcomers, and above all ranks.
            self._store = _bootstrap.TcpStore(host, port, token, _NEWCOMER - 1, timeout_s, local)
        except Error:
            self._server.stop(0)
            raise

    def num_waiting(self) -> int:
        """Number of newcomers that have come.

        Cost: a message to a thread of this process and back, tens of microseconds.
        """
        return int(self._store.add("grow/newcomers", 0))

    def give(self) -> Any:
        """The server, for a `grow` that admits those who wait; the door is closed then."""
        self._store.close()
        return self._server

    def close(self) -> None:
        """Stops listening: newcomers that wait raise PeerDiedError."""
        self._store.close()
        self._server.stop(0)


def grow(
    comm: Communicator, num_new: int, address: str, timeout_s: float, door: Door | None = None
) -> Communicator:
    """Makes a communicator of `comm`'s ranks and newcomers: see `Communicator.grow`.

    With a door, on rank 0, all who have come to it are admitted, `num_new` of them or more.
    """
    num_new = whole_number(num_new, "num_new", 1, _core.max_ranks - 1)
    timeout_s = seconds(timeout_s)
    host, port = host_and_port(address)
    token, local = _session_token()
    members = range(comm.size)
    with contextlib.ExitStack() as stack:
        if comm.rank == 0:
            if door is not None:
                server = door.give()
            else:
                server = _bootstrap.TcpStoreServer(host, port, token, local, reports_deaths=True)
            stack.callback(server.stop, _LAST_WORD_S)
        store = _bootstrap.TcpStore(host, port, token, comm.rank, timeout_s, local, comm, members)
        stack.callback(store.close)  # before the server, which goes when all have left
        try:
            if comm.rank == 0:
                _wait_for_newcomers(store, comm, num_new, local, timeout_s, door is not None)
            growth = _growth(store, timeout_s)
            world = _World(comm.rank, growth["size"], growth["name"], growth["token"] or token)
            new = _connect(store, world, comm.timeout_s, comm, members)
            _open_port(new, store, world, timeout_s, comm._owner_ports)
        except PeerDiedError as error:
            # The newcomers cannot see it, nor the server, if the rank had not come to it yet.
            with contextlib.suppress(Error):
                store.report_death(error.rank, str(error))
            raise
    return _replace(comm, new, [*members] + [-1] * (new.size - comm.size))


def join(address: str, timeout_s: float = 60.0) -> Communicator:
    """Joins a running world, whose ranks call `comm.grow`, as a newcomer.

    Args:
        address: "host:port" where the world's rank 0 waits, as given to `grow`.
        timeout_s: Seconds in which this process must find and join the world; also the timeout of
            every later operation.

    Returns:
        The communicator of the old ranks, followed by the newcomers in order of arrival.

    Raises:
        UsageError: `address` is invalid, the world has another PYCOLL_TOKEN, or it already has
            enough newcomers.
        TimeoutError: No world waits at `address`, or other newcomers did not join.
    """
    timeout_s = seconds(timeout_s)
    host, port = host_and_port(address)
    token, local = _session_token()
    number_here = _NEWCOMER + secrets.randbelow(_NEWCOMER)  # stores need a unique number
    try:
        store = _bootstrap.TcpStore(host, port, token, number_here, timeout_s, local)
    except TimeoutError as error:
        why = re.sub(
            r"^rank \d+ could not reach the store at (.*): start rank 0.*", r"\1", str(error)
        )
        raise TimeoutError(
            f"join: no world takes newcomers at {why}: its ranks call comm.grow(n, {address!r}), "
            "with the same PYCOLL_TOKEN"
        ) from None
    number = store.add("grow/newcomers", 1)
    growth = _growth(store, timeout_s)
    first, size = growth["first"], growth["size"]
    if number > size - first:
        raise UsageError(
            f"join: the world at {address} takes {size - first} newcomers, this is number {number}"
        )
    world = _World(first + number - 1, size, growth["name"], growth["token"] or token)
    new = _connect(store, world, timeout_s)
    _open_port(new, store, world, timeout_s)
    new.former_ranks = list(range(first)) + [-1] * (size - first)
    return new


def _wait_for_newcomers(
    store: Any, comm: Communicator, num_new: int, local: bool, timeout_s: float, takes_more: bool
) -> None:
    """On rank 0: waits, and publishes the new number of ranks or why there is no new world."""
    end = time.monotonic() + timeout_s
    growth: dict[str, Any] = {"first": comm.size}
    growth["name"] = secrets.token_hex(16)
    # Without a PYCOLL_TOKEN, the store is private to this user, so it can carry a secret.
    growth["token"] = secrets.token_hex(16) if local else ""
    while (came := store.add("grow/newcomers", 0)) < num_new and time.monotonic() < end:
        comm._check_alive(range(comm.size))
        time.sleep(_POLL_S)
    growth["size"] = comm.size + (max(came, num_new) if takes_more else num_new)
    if came < num_new:
        late = f"grow: {came} of {num_new} newcomers came within {timeout_s:g} s; they start "
        growth = {"late": late + "with pycoll.join(address) and the same PYCOLL_TOKEN"}
    store.set("grow/world", json.dumps(growth))


def _growth(store: Any, timeout_s: float) -> dict[str, Any]:
    """Rank 0's description of the new world; raises if there is none."""
    growth: dict[str, Any] = json.loads(store.get("grow/world", timeout_s + _LAST_WORD_S))
    if "late" in growth:
        raise TimeoutError(growth["late"])
    return growth


@dataclass(frozen=True)
class _World:
    """This rank's rank, size and name in a world that is being made."""

    rank: int
    size: int
    name: str  # unique among all worlds
    token: str


def _connect(
    store: Any,
    world: _World,
    operations_s: float,
    old: Communicator | None = None,
    members: Sequence[int] = (),
) -> Communicator:
    """Connects the ranks of a world, `members` of `old` among them."""
    from pycoll.communicator import Communicator

    who = (world.rank, world.size, world.name, world.token)
    return Communicator(_core.connect_ranks(store, *who, operations_s, old, members))


def _open_port(
    new: Communicator, store: Any, world: _World, timeout_s: float, former: Sequence[OwnerPort] = ()
) -> None:
    who, one_host = (world.rank, world.size), new.transport == "shm"
    exchange = exchange_through(store, *who)
    port = open_owner_port(exchange, *who, one_host, world.name, world.token, timeout_s, former)
    new._owner_ports.append(port)


def _replace(old: Communicator, new: Communicator, former_ranks: list[int]) -> Communicator:
    """Closes `old`, but not its port: a peer that finds the port closed treats the rank as dead."""
    new.former_ranks = former_ranks
    new.deterministic, new.register_after = old.deterministic, old.register_after
    servers = {port.server for port in new._owner_ports}
    new._owner_ports[:0] = [port for port in old._owner_ports if port.server not in servers]
    old._owner_ports.clear()
    old.close()
    return new


def _session_token() -> tuple[str, bool]:
    """Token shared with newcomers, which belong to another job, and whether it is no secret.

    Without PYCOLL_TOKEN the store then takes processes of this user on this host only.
    """
    token, local = _bootstrap.read_token(f"pycoll grow of user {os.getuid()}")
    return token, local
