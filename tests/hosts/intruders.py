"""Jobs among processes that try to become one of their ranks: other users, other hosts."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import store_client
from namespaces import TOKEN, Network, Outcome, free_port
from processes import wait_for_pids

import pycoll
from pycoll._core import bootstrap

OTHER_UID = 65534
MODES = {
    "default": {"PYCOLL_TOKEN": ""},
    "token": {"PYCOLL_TOKEN": TOKEN},
    "TLS": {"PYCOLL_TOKEN": TOKEN, "PYCOLL_TLS": "1"},
}
ANSWER_S = 0.3  # for an answer to a try
REFUSED, JOINED = "refused", "JOINED"


def listening_ports() -> list[tuple[str, int]]:
    """Addresses at which programs of the calling process's host listen."""
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if words[3] == "0A":
            octets = bytes.fromhex(address)[::-1]
            found.append((".".join(map(str, octets)), int(port, 16)))
    return found


def listening_names() -> list[tuple[str, int]]:
    """Abstract Unix sockets of the calling process's host that listen, with their types."""
    words = [line.split() for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]]
    listens = 0x10000
    return [
        ("\0" + w[7][1:], int(w[4], 16))
        for w in words
        if len(w) > 7 and w[7].startswith("@") and int(w[3], 16) & listens
    ]


@contextlib.contextmanager
def connected(place: tuple[str, int]) -> Iterator[socket.socket]:
    """A connection to an address and port, or to the name of a Unix socket of that type."""
    name, number = place
    if not name.startswith("\0"):
        with socket.create_connection(place, 1) as s:
            yield s
        return
    with socket.socket(socket.AF_UNIX, socket.SocketKind(number)) as s:
        s.settimeout(1)
        s.connect(name)
        yield s


def speak(place: tuple[str, int], rank: int, recorded: bytes) -> str:
    """One try to become a rank: of the store, of the mesh, or with what a rank once said."""
    with contextlib.suppress(OSError, struct.error), connected(place) as s:
        s.settimeout(ANSWER_S)
        if recorded:
            s.sendall(recorded)
            answer = store_client.read_frame(s)
            while answer is not None and answer[0] == store_client.CHALLENGE:
                answer = store_client.read_frame(s)
            return JOINED if answer and answer[0] == store_client.OK else REFUSED
        try:
            answer = store_client.join(s, "guess", rank)
        except AssertionError:  # not a store: a port of the links, or of shrink
            return REFUSED
        return JOINED if answer == store_client.OK else REFUSED
    return REFUSED


def attack(
    address: str, port: int, host_id: str, recorded: bytes, tries: int, other_user: bool
) -> Counter[str]:
    """Tries so often to become rank 2, of that host id. How often each outcome came."""
    "".encode("idna")  # loaded before the process cannot read it any more
    if other_user:
        os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
    counts: Counter[str] = Counter()
    for i in range(tries):
        counts.update(speak((address, port), 2, what) for what in (b"", recorded))
        if i % 10 == 0:
            for token in ("", "none", f"uid 0 {host_id}", "uid 0 "):
                try:
                    store = bootstrap.TcpStore(address, port, token, 2, 0.02, other_user)
                    store.set("hosts/places/2", host_id)
                    counts[JOINED] += 1
                except pycoll.Error:
                    counts[REFUSED] += 1
            counts.update(speak(place, 2, b"") for place in listening_ports())
            if other_user:
                for place in listening_names():
                    counts.update(speak(place, 2, what) for what in (b"", recorded))
    return counts


def record(address: str, port: int, token: str) -> bytes:
    """What a rank with the token says when it joins the store of another job as rank 2."""
    number = bytes(16)
    with socket.create_connection((address, port), 5) as s:
        s.sendall(store_client.hello(2, number))
        answer = store_client.read_frame(s)
        assert answer is not None
        proof = store_client.proof(token, b"connect", 2, number, answer[1])
        last = store_client.frame(store_client.PROOF, store_client.text(proof), 2)
        s.sendall(last)
        answer = store_client.read_frame(s)
        assert answer is not None and answer[0] == store_client.OK
    return store_client.hello(2, number) + last


def recorded_elsewhere(address: str, port: int, token: str) -> bytes:
    server = bootstrap.TcpStoreServer(address, port, token)
    try:
        return record(address, port, token)
    finally:
        server.stop()


def rank_main(folder: Path) -> list[list[float]]:
    """Reduces until the file `over` is there, then in the world after a shrink. All sums."""
    sums = []
    with pycoll.init(timeout_s=60) as comm:
        (folder / f"rank{comm.rank}").write_text(str(os.getpid()))
        is_over = False
        while not is_over:
            is_over = bool(comm.broadcast(np.array([(folder / "over").exists()]))[0])
            sums.append(comm.all_reduce(np.full(1000, comm.rank + 1.0))[::999].tolist())
        with comm.shrink(30) as new:
            sums.append(new.all_reduce(np.full(1000, new.rank + 1.0))[::999].tolist())
    return sums


def job_among_intruders(
    network: Network, mode: str, tries: int, folder: Path
) -> tuple[list[Outcome], list[Counter[str]]]:
    """Ranks 0 and 1 wait for rank 2 while others try to be rank 2; then it comes and they work.

    Without a token all ranks are on one host. Returns the outcomes of the ranks, and of the others
    how often each was refused: another user on rank 0's host, one on another host, and the same
    user on another host, first while the ranks join, and then while they work.
    """
    port = free_port()
    is_local = mode == "default"
    address = "127.0.0.1" if is_local else network.address(0)
    token = MODES[mode]["PYCOLL_TOKEN"] or TOKEN
    tls = MODES[mode].get("PYCOLL_TLS", "0")
    recorded = network.outcome(
        network.start(0, functools.partial(recorded_elsewhere, address, port + 20_000, token))
    ).get()
    ids = [network.outcome(network.start(host, bootstrap.host_id)).get() for host in (0, 1)]
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": address, "MASTER_PORT": str(port)} | MODES[mode]

    def start(rank: int, host: int) -> int:
        return network.start(
            0 if is_local else host,
            functools.partial(rank_main, folder),
            **world,
            RANK=str(rank),
        )

    def start_attack(host: int, host_id: str, other_user: bool) -> int:
        job: Callable[[], Any] = functools.partial(
            attack, network.address(0), port, host_id, recorded, tries, other_user
        )
        return network.start(host, job, PYCOLL_TOKEN="", PYCOLL_TLS=tls)

    def attack_all() -> list[Counter[str]]:
        places = [(0, ids[1], True), (1, ids[0], True), (1, ids[1], False)]
        pids = [start_attack(*place) for place in places]
        return [network.outcome(pid, 100).get() for pid in pids]

    ranks = [start(0, 0), start(1, 1)]
    counts = attack_all()
    ranks.append(start(2, 1))
    wait_for_pids(folder, 3)
    counts += attack_all()
    (folder / "over").touch()
    return network.outcomes(ranks), counts


def complaint(outcomes: list[Outcome], counts: list[Counter[str]], tries: int) -> str:
    """What is wrong: an intruder that became a rank or did not try, a rank that was disturbed."""
    for count in counts:
        if set(count) != {REFUSED} or count[REFUSED] < 2 * tries:
            return f"an intruder's tries: {counts}"
    for rank, outcome in enumerate(outcomes):
        if outcome.error or any(total != [6.0, 6.0] for total in outcome.value):
            return f"rank {rank}: {outcome}"
    return ""
