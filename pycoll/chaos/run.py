"""Runs an elastic training, and injects faults into its ranks at commits that a seed chooses."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pycoll.chaos.faults import inject
from pycoll.chaos.notes import Note
from pycoll.elastic.owner_port import free_address
from pycoll.launch.elastic_script import ElasticLaunch
from pycoll.launch.processes import World

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is to be injected.

    Attributes:
        commit: After which commit of the training.
        kind: A name of `pycoll.chaos.faults.FAULTS`.
        number: The rank, modulo the ranks that are there then.
        lasts_s: How long it lasts.
    """

    commit: int
    kind: str
    number: int
    lasts_s: float


def drawn(
    seed: int, kinds: Sequence[str], num_faults: int, commits: int, most_s: float
) -> list[Fault]:
    """The faults of a seed, at different commits of a training that has so many."""
    random_of = random.Random(seed)
    at = sorted(random_of.sample(range(1, commits - 1), min(num_faults, max(commits - 2, 0))))
    return [
        Fault(
            commit,
            random_of.choice(kinds),
            random_of.randrange(1 << 16),
            random_of.uniform(0, most_s),
        )
        for commit in at
    ]


class _Injector:
    """Reads the notes of the ranks, and injects each fault at its commit."""

    def __init__(self, pipe: int, faults: Sequence[Fault], say: Callable[[str], None]) -> None:
        self.notes: list[Note] = []
        self._pipe, self._faults, self._say = pipe, list(faults), say
        self._pids: dict[int, int] = {}  # by rank, of the ranks that are there
        self._running: list[threading.Thread] = []

    def follow(self) -> None:
        """Returns when all ranks have ended and all faults are over."""
        with os.fdopen(self._pipe, "rb") as lines:
            for line in lines:
                note = Note.of_line(line)
                self.notes.append(note)
                if note.what == "built":
                    self._pids[note.rank] = note.pid
                    self._pids = {r: pid for r, pid in self._pids.items() if r < note.size}
                elif self._faults and note.commits >= self._faults[0].commit:
                    self._inject(self._faults.pop(0))
        for thread in self._running:
            thread.join()

    def _inject(self, fault: Fault) -> None:
        rank = sorted(self._pids)[fault.number % len(self._pids)]
        pid = self._pids[rank]
        lasts = "" if fault.kind == "kill" else f" for {1e3 * fault.lasts_s:.0f} ms"
        self._say(f"commit {fault.commit}: {fault.kind} rank {rank} (process {pid}){lasts}")
        thread = threading.Thread(target=inject, args=(fault.kind, pid, fault.lasts_s))
        self._running.append(thread)
        thread.start()


def run(
    command: list[str],
    num_ranks: int,
    faults: Sequence[Fault],
    say: Callable[[str], None],
    timeout_s: float,
) -> tuple[int, list[Note]]:
    """Runs a script to its end, with these faults.

    Args:
        command: The script and its arguments.
        num_ranks: Number of ranks at the start; those that end are started again.
        faults: In the order of their commits.
        say: Called with a line for each fault.
        timeout_s: Seconds after which all ranks are ended.

    Returns:
        The exit status, and the notes of all ranks.
    """
    read, write = os.pipe()
    os.set_inheritable(write, True)
    injector = _Injector(read, faults, say)
    thread = threading.Thread(target=injector.follow)
    thread.start()
    deadline = threading.Timer(timeout_s, os.kill, (os.getpid(), signal.SIGTERM))
    deadline.start()
    argv = [sys.executable, "-m", "pycoll.chaos.rank", str(write), *command]
    extra = {"PYCOLL_ELASTIC": free_address("127.0.0.1"), "OMP_NUM_THREADS": "1"}
    restarts = len(faults) + num_ranks
    launch = ElasticLaunch(
        argv, World(num_ranks), extra, True, _GRACE_S, least=1, restarts=restarts
    )
    try:
        status = launch.run()
    finally:
        deadline.cancel()
        os.close(write)
        thread.join()
    return status, injector.notes


__all__ = ["Fault", "drawn", "run"]
