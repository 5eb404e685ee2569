"""The port of each rank for shrink: unauthenticated peers change nothing, whatever they send."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from worlds import end, start

import pycoll
from pycoll.elastic.agreement import ShrinkAgreement
from pycoll.elastic.messages import BROKEN, Verdict, refusal
from pycoll.elastic.owner_port import Address, OwnerPort, open_owner_port
from pycoll.elastic.port_server import PortServer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

Comm = pycoll.Communicator

# Lines that Python's JSON reader, or the code behind it, answers with various errors.
_HOSTILE = [
    b"[" * 60_000 + b"\n",
    b'{"a":' * 9_000 + b"\n",
    b'{"nonce": "NONCE", "rank": 1e999, "proof": "", "ended": []}\n',
    b'{"nonce": "NONCE", "rank": -1e999, "proof": "", "ended": []}\n',
    b'{"nonce": "NONCE", "rank": NaN, "proof": "", "ended": []}\n',
    b'{"nonce": "NONCE", "rank": ' + b"9" * 5000 + b"}\n",
    b'{"nonce": "NONCE", "rank": 1, "proof": 3, "ended": []}\n',
    b'{"nonce": "NONCE", "rank": 1, "proof": "\\ud800\\u00e9", "ended": []}\n',
    b'{"nonce": [], "rank": {}, "proof": null}\n',
    b'{"nonce": "zz", "rank": "x"}\n',
    b"null\n",
    b"3\n",
    b"\xff\xfe\x00\n",
    b"x" * 200_000,
    b"\n",
]
HOSTILE = [line.replace(b"NONCE", bytes(32).hex().encode()) for line in _HOSTILE]


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def is_closed(s: socket.socket) -> bool:
    """Whether the other end has closed the connection; what it has sent before is dropped."""
    with contextlib.suppress(ConnectionResetError):
        while data := s.recv(4096):
            assert data
    return True


@contextlib.contextmanager
def owner_port(**environment: str):
    """A rank's port in a world of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        exchange = lambda topic, own, timeout_s: [own.encode(), own.encode()]  # noqa: E731
        port = open_owner_port(exchange, 0, 2, not environment, "a world", "a token", 5)
    try:
        yield port
    finally:
        port.server.close()


def greet(port: OwnerPort, s: socket.socket, rank: int, ended: list[int]) -> dict:
    """Speaks as a rank of the world that calls `shrink`; returns the answer."""
    file = s.makefile("rb")
    nonces = bytes.fromhex(json.loads(file.readline())["nonce"]) + bytes(32)
    proof = port.proof("follower", rank, nonces)
    hello = {"rank": rank, "nonce": bytes(32).hex(), "ended": ended, "proof": proof}
    hello |= {"topic": "shrink", "value": None, "proposal": None}
    s.sendall(json.dumps(hello).encode() + b"\n")
    answer = json.loads(file.readline())
    assert answer == {"proof": port.proof("coordinator", port.rank, nonces)}
    return answer


async def joined(server: PortServer) -> list[int]:
    return sorted(server.members("shrink"))


def wait_until_joined(port: OwnerPort, ranks: list[int]) -> None:
    deadline = time.monotonic() + 10
    while (found := port.server.run(joined(port.server))) != ranks:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_messages_of_unauthenticated_peers_are_refused_without_a_traceback(capfd):
    with owner_port() as port:
        for text in HOSTILE * 3:
            with connect(port.own.port) as s:
                with contextlib.suppress(ConnectionError):
                    s.sendall(text)
                assert is_closed(s), text[:50]
        with connect(port.own.port) as s:
            greet(port, s, 1, [])
            wait_until_joined(port, [1])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "rank, ended", [(2, []), (-1, []), (0.0, []), (1, [2]), (1, ["1"]), (1, [0] * 3), (1, {})]
)
def test_hello_of_a_member_that_names_no_rank_of_the_world_is_refused(rank, ended):
    with owner_port() as port, connect(port.own.port) as s:
        with pytest.raises((json.JSONDecodeError, ConnectionError)):
            greet(port, s, rank, ended)
        assert is_closed(s)
        assert port.server.run(joined(port.server)) == [] and not port.server.ended


def test_member_that_sends_more_than_its_hello_is_disconnected():
    with owner_port() as port, connect(port.own.port) as s:
        greet(port, s, 1, [])
        wait_until_joined(port, [1])
        with pytest.raises(ConnectionError):
            while True:
                s.sendall(bytes(1 << 20))
        wait_until_joined(port, [])


VERDICTS = [
    {"ranks": [0, 1], "ended": [], "name": "w", "host": "127.0.0.1", "port": 1 << 16},
    {"ranks": [0, 1], "ended": [], "name": "w", "host": "127.0.0.1", "port": True},
    {"ranks": [0], "ended": [], "name": "w", "host": "127.0.0.1", "port": 1},
    {"ranks": [1, 0], "ended": [], "name": "w", "host": "127.0.0.1", "port": 1},
    {"ranks": [0, 1, 2], "ended": [], "name": "w", "host": "127.0.0.1", "port": 1},
    {"ranks": [0, 1], "ended": [], "name": "\x1b[2J", "host": "127.0.0.1", "port": 1},
    {"ranks": [0, 1], "ended": [], "name": "w" * 5000, "host": "127.0.0.1", "port": 1},
    {"ranks": "01", "ended": [], "name": "w", "host": [], "port": 1},
    {"refused": ["no"]},
    {},
]


@pytest.mark.parametrize("message", VERDICTS)
def test_verdict_that_no_coordinator_sends_is_refused(message):
    good = {"ranks": [0, 1], "ended": [], "name": "w", "host": "127.0.0.1", "port": 1}
    assert Verdict.read(good, 1, 2).to_message() == good
    with pytest.raises(BROKEN):
        assert refusal(message) is None
        Verdict.read(message, 1, 2)


def test_hostile_answers_at_the_port_of_a_lower_rank_do_not_end_a_shrink():
    """Another program may have the port of a rank that has ended."""
    num_answers = 0

    def answer(listener: socket.socket) -> None:
        nonlocal num_answers
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection, contextlib.suppress(OSError):
                    num_answers += 1
                    connection.sendall(HOSTILE[num_answers % 5])

    with owner_port() as own, socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        lower = Address(("127.0.0.1",), listener.getsockname()[1])
        port = replace(own, rank=1, addresses=[lower, own.own])
        port.server.serve(1, 2, port.proof)
        with pytest.raises(pycoll.TimeoutError, match="rank 0 did not call it within 0.5 s"):
            port.server.run(ShrinkAgreement(port, lambda host: 0, 0.5, 0.5).verdict())
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert num_answers >= 5


@pytest.mark.slow
def test_rank_that_connected_before_shrink_stays_and_idle_peers_are_dropped_oldest_first():
    with owner_port() as port, contextlib.ExitStack() as stack:
        num_fds = len(os.listdir("/proc/self/fd"))
        rank = stack.enter_context(connect(port.own.port))
        greet(port, rank, 1, [])
        idle = [stack.enter_context(connect(port.own.port)) for _ in range(600)]
        assert all(is_closed(each) for each in idle[:300])
        idle[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            is_closed(idle[-1])
        wait_until_joined(port, [1])
        assert len(os.listdir("/proc/self/fd")) < num_fds + 600 + 270
        rank.close()
        wait_until_joined(port, [])
        idle[-1].settimeout(10)
        assert is_closed(idle[-1]), "an idle peer stays for seconds only"


def test_proof_of_another_world_is_refused():
    with owner_port() as port:
        other = replace(port, rank=0, secret=b"another secret")
        with connect(port.own.port) as s, pytest.raises((json.JSONDecodeError, ConnectionError)):
            greet(other, s, 1, [])
        port.server.serve(0, 2, other.proof)
        with connect(port.own.port) as s:
            greet(other, s, 1, [])
            wait_until_joined(port, [1])
            port.server.serve(0, 2, port.proof)  # the next world
            assert is_closed(s)
            wait_until_joined(port, [])


def test_port_listens_only_at_the_addresses_of_the_interfaces():
    with owner_port(PYCOLL_IFNAME="lo") as port:
        assert "127.0.0.1" in port.own.hosts
        for host in port.own.hosts:
            socket.create_connection((host, port.own.port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):  # an address of this host, but not of the list
            socket.create_connection(("127.0.0.2", port.own.port), timeout=5)


def test_closed_port_leaves_no_thread_and_no_descriptor():
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with owner_port() as port, connect(port.own.port), connect(port.own.port):
            pass
        with pytest.raises(ConnectionRefusedError):
            connect(port.own.port)
    assert "pycoll port" not in [thread.name for thread in threading.enumerate()]
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_port_out_of_descriptors_accepts_again_when_some_are_free():
    with owner_port() as port, contextlib.ExitStack() as stack:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        idle = [socket.socket() for _ in range(8)]
        for each in idle:
            stack.enter_context(each)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        # The server accepts with this process's descriptors: none is left.
        resource.setrlimit(resource.RLIMIT_NOFILE, (idle[-1].fileno() + 1, limits[1]))
        for each in idle:
            each.connect(("127.0.0.1", port.own.port))
        time.sleep(0.3)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with connect(port.own.port) as s:
            greet(port, s, 1, [])
            wait_until_joined(port, [1])


def hold_open(address: Address, count: int, ready: int) -> None:
    """Opens idle connections until it is killed; a second process of the attacker."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    kept = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            kept.append(socket.create_connection((address.hosts[0], address.port), timeout=10))
    os.write(ready, len(kept).to_bytes(4, "little"))
    signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize("count", [10_000])
def test_idle_connections_do_not_make_a_late_rank_count_as_lost(count, monkeypatch):
    """Rank 2 is late for longer than PYCOLL_SILENCE_S, and its port has many idle connections."""
    monkeypatch.setenv("PYCOLL_SILENCE_S", "0.5")

    def work(comm: Comm) -> tuple[list[int], int, int]:
        attacker = opened = 0
        port = comm._owner_ports[-1]
        if comm.rank == 2:
            reads, ready = os.pipe()
            if (attacker := os.fork()) == 0:
                try:
                    hold_open(port.own, count, ready)
                finally:
                    os._exit(0)
            opened = int.from_bytes(os.read(reads, 4), "little")
        comm.barrier()
        try:
            if comm.rank == 2:
                time.sleep(2)
            num_fds = len(os.listdir("/proc/self/fd"))
            with comm.shrink(20) as new:
                total = new.all_reduce(np.ones(3))[0]
                assert total == new.size
                return new.former_ranks, opened, num_fds
        finally:
            if attacker:
                os.kill(attacker, signal.SIGKILL)
                os.waitpid(attacker, 0)

    outcomes = end(start(work, 3))
    assert [outcome[0] for outcome in outcomes] == [[0, 1, 2]] * 3, outcomes
    _, opened, num_fds = outcomes[2]
    assert opened == count
    assert num_fds < 256 + 64
