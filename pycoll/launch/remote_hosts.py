"""`pycoll run --hosts`: where ranks on other hosts are started, and by what command.

Each rank is a program like ssh on this host, which starts `pycoll.launch.remote_rank` on the other
host. The rank's command goes through standard input, so that no list of processes shows the
session's token. When this host or ssh is gone, the input ends, which ends the rank.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pycoll import environment
from pycoll.errors import UsageError

SSH_VARIABLE = "PYCOLL_SSH"
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_PASSED_ON = ("PYCOLL_", "OMP_", "MKL_", "CUDA_", "PYTHONUNBUFFERED")
_SSH_FAILED, _NOT_FOUND = 255, 127


def host_names(text: str) -> list[str]:
    """Of --hosts "a,b". Raises UsageError for an empty name."""
    names = text.split(",")
    if not all(names):
        raise UsageError(f"--hosts {text!r}: expected names such as a,b")
    return names


def ssh_words(ssh: str | None) -> list[str]:
    """The program that gets a host and a command line: what is asked for, PYCOLL_SSH, or ssh."""
    return shlex.split(ssh or environment.read(SSH_VARIABLE) or _SSH)


def over_there(words: Sequence[str]) -> str:
    """The command line that starts a program on another host, in the same folder as here."""
    path = os.environ.get("PYTHONPATH")
    set_path = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    return f"cd {shlex.quote(os.getcwd())} && {set_path}exec {shlex.join(words)}"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a launch, one after another, with their shares of the ranks.

    Attributes:
        names: as ssh knows them, perhaps with a user: "ann@a".
        size: number of ranks.
        ssh: the program that gets a host and a command line, with its options.
    """

    names: Sequence[str]
    size: int
    ssh: Sequence[str]
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    port: int = field(default_factory=lambda: _FIRST_PORT + secrets.randbelow(_NUM_PORTS))

    @classmethod
    def parse(cls, text: str, size: int, ssh: str | None) -> Hosts:
        """From "a,b" and a command line; without one, PYCOLL_SSH's or ssh itself.

        Raises:
            UsageError: no host, an empty name, or more hosts than ranks.
        """
        names = host_names(text)
        if len(names) > size:
            raise UsageError(f"--hosts names {len(names)} hosts for {size} ranks: expected -n more")
        return cls(names, size, ssh_words(ssh))

    def close(self) -> None:
        """As a World's; there is nothing to give back."""

    def place(self, rank: int) -> tuple[str, int, int]:
        """The rank's host, its place there, and how many ranks are there."""
        first = 0
        for i, name in enumerate(self.names):
            here = self.size // len(self.names) + (i < self.size % len(self.names))
            if rank < first + here:
                return name, rank - first, here
            first += here
        raise IndexError(rank)

    def environment(self, rank: int) -> Mapping[str, str]:
        """What `pycoll.init` of this rank reads. All hosts must reach the first by its name."""
        _, local_rank, here = self.place(rank)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(here),
            "MASTER_ADDR": self.names[0].rpartition("@")[2],
            "MASTER_PORT": str(self.port),
            "PYCOLL_TOKEN": self.token,
        }

    def command(self, rank: int) -> list[str]:
        """What starts the rank from here."""
        line = over_there([sys.executable, "-m", "pycoll.launch.remote_rank"])
        return [*self.ssh, self.place(rank)[0], line]

    def order(self, rank: int, argv: list[str], extra: Mapping[str, str], grace_s: float) -> bytes:
        """What the rank over there reads first."""
        own = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        env = {**own, **self.environment(rank), **extra}
        return json.dumps({"argv": argv, "env": env, "grace_s": grace_s}).encode() + b"\n"

    def hint(self, rank: int, status: int) -> str:
        """What to do about a rank that has ended so; empty where that is the script's matter."""
        host = self.place(rank)[0]
        if status == _SSH_FAILED:
            return f": try `{shlex.join([*self.ssh, host, 'true'])}`"
        if status == _NOT_FOUND:
            return f": host {host} needs this Python at the same place, {sys.executable}"
        return ""


__all__ = ["Hosts", "host_names", "over_there", "ssh_words"]
