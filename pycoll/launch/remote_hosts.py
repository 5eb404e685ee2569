"""`pycoll run --hosts`: placement and start commands of ranks on other hosts.

For each rank, this host runs a program like ssh, which starts `pycoll.launch.remote_rank` on the
other host. The rank's command is sent through standard input, so that the session's token appears
in no process list. When this host or ssh fails, the input ends, which ends the rank.
"""

from __future__ import annotations

import json
import os
import re
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
    """Parses the names of --hosts "a,b".

    Raises:
        UsageError: A name is empty, ssh would read it as an option, or it has blanks.
    """
    names = text.split(",")
    if not all(re.fullmatch(r"(?!-)[!-~]+", name) for name in names):
        raise UsageError(f"--hosts {text!r}: expected names such as a,b; no name begins with -")
    return names


def ssh_words(ssh: str | None) -> list[str]:
    """The words of `ssh`, else of PYCOLL_SSH, else ssh itself."""
    return shlex.split(ssh or environment.read(SSH_VARIABLE) or _SSH)


def over_there(words: Sequence[str]) -> str:
    """Command line that starts a program on another host, in the current folder."""
    path = os.environ.get("PYTHONPATH")
    set_path = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    return f"cd {shlex.quote(os.getcwd())} && {set_path}exec {shlex.join(words)}"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a launch, in order, with their shares of the ranks.

    Attributes:
        names: names for ssh, optionally with a user: "ann@a".
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
        """Makes Hosts from names "a,b" and an ssh command; None: PYCOLL_SSH or ssh.

        Raises:
            UsageError: there is no host, an empty name, or more hosts than ranks.
        """
        names = host_names(text)
        if len(names) > size:
            raise UsageError(
                f"--hosts names {len(names)} hosts for {size} ranks: expected -n {len(names)} or "
                "more"
            )
        return cls(names, size, ssh_words(ssh))

    def close(self) -> None:
        """Does nothing; World.close releases a port."""

    def place(self, rank: int) -> tuple[str, int, int]:
        """The rank's host, its local rank there, and the host's number of ranks."""
        first = 0
        for i, name in enumerate(self.names):
            here = self.size // len(self.names) + (i < self.size % len(self.names))
            if rank < first + here:
                return name, rank - first, here
            first += here
        raise IndexError(rank)

    def environment(self, rank: int) -> Mapping[str, str]:
        """Environment for `pycoll.init` on this rank; all hosts reach the first by its name."""
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
        """Local command that starts the rank."""
        line = over_there([sys.executable, "-m", "pycoll.launch.remote_rank"])
        return [*self.ssh, self.place(rank)[0], line]

    def order(self, rank: int, argv: list[str], extra: Mapping[str, str], grace_s: float) -> bytes:
        """First input of the remote rank."""
        own = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        env = {**own, **self.environment(rank), **extra}
        return json.dumps({"argv": argv, "env": env, "grace_s": grace_s}).encode() + b"\n"

    def hint(self, rank: int, status: int) -> str:
        """Advice for a rank that ended with `status`; empty if the script itself failed."""
        host = self.place(rank)[0]
        if status == _SSH_FAILED:
            return f": try `{shlex.join([*self.ssh, host, 'true'])}`"
        if status == _NOT_FOUND:
            return f": host {host} needs this Python at the same path, {sys.executable}"
        return ""


__all__ = ["Hosts", "host_names", "over_there", "ssh_words"]
