"""Unauthenticated peers: programs that connect to the ports of a job without knowing its token."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from namespaces import Network

import pycoll

KINDS = ("bytes", "scan", "slow", "token", "rank")
MORE_S = 30  # on a machine that is busy with other programs
TLS_KINDS = ("bytes", "slow greeting", "wrong token")


def listening_ports() -> list[int]:
    """The ports on which programs of the calling process's host listen."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    words = [line.split() for line in lines]
    return [int(w[1].split(":")[1], 16) for w in words if w[3] == "0A"]


class Counts:
    """How many connections of each attacker were accepted, in memory shared with the job."""

    def __init__(self, num_attackers: int) -> None:
        self.accepted = np.frombuffer(mmap.mmap(-1, 8 * num_attackers), np.int64)

    def wait_for_all(self, timeout_s: float = 20) -> None:
        """Waits until each attacker has had a connection."""
        end_s = time.monotonic() + timeout_s
        while not self.accepted.all() and time.monotonic() < end_s:
            time.sleep(0.01)
        assert self.accepted.all(), f"connections of the attackers: {self.accepted}"


def attack(address: str, kind: str, seconds: float, counts: Counts, idx: int) -> int:
    """Connects to every port for so long, and until a connection was accepted. Returns how many."""
    kept, accepted = [], 0
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end or (accepted == 0 and now < end + MORE_S):
        for port in listening_ports():
            with contextlib.suppress(OSError, pycoll.UsageError, pycoll.TimeoutError):
                if kind == "wrong token":
                    accepted += 1
                    pycoll._core.bootstrap.TcpStore(address, port, "another token", 1, 0.05)
                    continue
                s = socket.create_connection((address, port), timeout=0.2)
                accepted += 1
                if "slow" in kind:
                    kept.append(s)  # neither sends the rest nor closes
                speak(s, kind)
        counts.accepted[idx] = accepted
        time.sleep(0.02)
    return accepted


def speak(s: socket.socket, kind: str) -> None:
    if kind == "bytes":
        s.sendall(os.urandom(5000))
    elif kind == "slow":
        s.sendall(b"p")
    elif kind == "slow greeting":
        s.sendall(b"\x16\x03\x01\x02")
    elif kind == "token":
        s.sendall(b"pycoll 1" + (1).to_bytes(4, "little") + bytes(20))
        s.settimeout(0.3)
        s.recv(4096)  # the random number of the listener
        s.sendall(bytes(32))
        assert s.recv(32) == b""  # the listener does not even prove that it knows the token
    elif kind == "rank":
        s.sendall(b"pycoll 1" + (7).to_bytes(4, "little") + bytes(20))


def start(
    network: Network,
    kinds: tuple[str, ...],
    seconds: float,
    counts: Counts | None = None,
    **env: str,
) -> list[int]:
    """Starts attackers of all kinds on host 0. Their outcomes: how many connections they made."""
    address = network.address(0)
    shown = counts or Counts(len(kinds))

    def attacker(idx: int) -> Callable[[], int]:
        return lambda: attack(address, kinds[idx], seconds, shown, idx)

    return [network.start(0, attacker(idx), **env) for idx in range(len(kinds))]
