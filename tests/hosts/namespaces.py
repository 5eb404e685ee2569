"""Hosts for tests: network namespaces of this machine, behind one switch.

Each has its own interface, address and host name, so that ranks in two of them reach each other
through the network alone. Needs root and iproute2. Nothing outlives `Network.close()`, and a run
that was killed is cleaned up by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import pickle
import re
import selectors
import shutil
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMESPACES = Path("/run/netns")
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
TOKEN = "a token of tests that is hard to guess"
# Debian keeps ip and tc there, and not every root has these folders on its path.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def why_not() -> str:
    """Why this machine cannot have such hosts; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "network namespaces need iproute2 (ip, tc)"
    name = f"pyct{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"this system allows no network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def tc(namespace: str, *words: str) -> None:
    subprocess.run(["tc", "-n", namespace, *words], check=True, capture_output=True)


@dataclass(frozen=True)
class Outcome:
    """A rank's result, or the error that it raised."""

    value: Any = None
    error: str = ""  # name of the exception's type
    text: str = ""
    rank: int = -1  # of a PeerDiedError
    seconds: float = 0.0
    ended: int = 0  # status of the process
    fds_leaked: int = 0

    def get(self) -> Any:
        return values([self])[0]


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The results of the ranks. Fails with the errors of all ranks that raised or were killed."""
    wrong = [
        f"rank {rank}: {one.error or f'status {one.ended}'}: {one.text}"
        for rank, one in enumerate(outcomes)
        if one.error or one.ended
    ]
    assert not wrong, "\n".join(wrong)
    return [one.value for one in outcomes]


_numbers = itertools.count()


@dataclass
class Network:
    """`n` hosts: host i has address 10.77.0.(i + 1)."""

    n: int
    name: str = field(default_factory=lambda: f"pyc{os.getpid()}")

    def __post_init__(self) -> None:
        self._remove_stale()
        self.name += f"n{next(_numbers)}"  # a process may have several
        self._children: dict[int, int] = {}  # pid -> pipe
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for space in [self.switch, *map(self.namespace, range(self.n))]:
                ip("netns", "add", space)
            self._connect()
            for host in range(self.n):
                space = self.namespace(host)
                ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "lo", "up")
                ip("-n", space, "link", "set", "eth0", "up")
            undo.pop_all()

    def _connect(self) -> None:
        """Gives every host its eth0, and connects them."""
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for host in range(self.n):
            # 9000 bytes: so the bytes of headers are few beside those of messages.
            ip("-n", self.namespace(host), "link", "add", "eth0", "mtu", "9000", "type", "veth",
               "peer", "name", f"port{host}", "mtu", "9000", "netns", self.switch)  # fmt: skip
            ip("-n", self.switch, "link", "set", f"port{host}", "master", "br0", "up")

    @staticmethod
    def _remove_stale() -> None:
        for path in NAMESPACES.glob("pyc[0-9]*"):
            found = re.match(r"pyc(\d+)[a-z]?n", path.name)
            if found and not Path(f"/proc/{found[1]}").exists():
                subprocess.run(["ip", "netns", "del", path.name], capture_output=True)

    @property
    def switch(self) -> str:
        return f"{self.name}s"

    def namespace(self, host: int) -> str:
        return f"{self.name}h{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def set_rate(self, rate: str | None, burst: str = "256kb") -> None:
        """Both ways of every host's link, such as "1gbit"; None: as fast as it goes.

        By default the burst takes a whole segment of TCP offload, which stays one packet.
        """
        for host in range(self.n):
            for space, link in self._queues(host):
                with contextlib.suppress(subprocess.CalledProcessError):
                    tc(space, "qdisc", "del", "dev", link, "root")
                if rate is not None:
                    tc(space, "qdisc", "add", "dev", link, "root", "tbf", "rate", rate,
                       "burst", burst, "latency", "50ms")  # fmt: skip

    def set_congestion_control(self, name: str) -> None:
        """Sets it for all new connections between the hosts: "cubic" is Linux's default."""
        for host in range(self.n):
            ip("-n", self.namespace(host), "route", "change", "10.77.0.0/24", "dev", "eth0",
               "scope", "link", "src", self.address(host), "congctl", name)  # fmt: skip

    def set_send_buffers(self, nbytes: int) -> None:
        """What the kernel takes at most of a connection's unsent bytes, for new connections."""
        for host in range(self.n):
            set_it = f"echo 4096 16384 {nbytes} > /proc/sys/net/ipv4/tcp_wmem"
            ip("netns", "exec", self.namespace(host), "sh", "-c", set_it)

    def _queues(self, host: int) -> list[tuple[str, str]]:
        """Namespaces and interfaces of the queues at a host's port."""
        return [(self.namespace(host), "eth0"), (self.switch, f"port{host}")]

    def set_link(self, host: int, up: bool) -> None:
        """The cable of a host."""
        ip("-n", self.switch, "link", "set", f"port{host}", "up" if up else "down")

    def set_loss(self, percent: int) -> None:
        """Drops so many of the packets that reach a host, at random. Needs nftables."""
        for host in range(self.n):
            enter = ["ip", "netns", "exec", self.namespace(host)]
            subprocess.run([*enter, "nft", "delete", "table", "inet", "loss"], capture_output=True)
            if percent:
                rules = (
                    "add table inet loss; "
                    "add chain inet loss input { type filter hook input priority 0; }; "
                    f"add rule inet loss input numgen random mod 100 < {percent} drop"
                )
                subprocess.run([*enter, "nft", rules], check=True, capture_output=True)

    def enter(self, host: int) -> None:
        """Makes the calling process a process of that host."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(NAMESPACES / self.namespace(host), os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(fd, CLONE_NEWNET) != 0 or libc.unshare(CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
        socket.sethostname(f"host{host}")

    def start(self, host: int, fn: Callable[[], Any], **env: str) -> int:
        """Runs `fn` in a process of that host. Returns its pid, for `outcome`."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.close(read)
                self.enter(host)
                os.environ.update(env)
                outcome = _run(fn)
                with os.fdopen(write, "wb") as pipe:
                    pickle.dump(outcome, pipe)
            os._exit(0)
        os.close(write)
        self._children[pid] = read
        return pid

    def kill(self, pid: int) -> None:
        """Kills a process that `start` began."""
        os.kill(pid, signal.SIGKILL)
        self.outcome(pid)

    def outcome(self, pid: int, timeout_s: float = 60) -> Outcome:
        pipe = self._children.pop(pid)
        data = b""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector, os.fdopen(pipe, "rb", 0) as file:
            selector.register(file, selectors.EVENT_READ)
            while True:
                if not selector.select(deadline - time.monotonic()):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    return Outcome(error="Hang", text=f"no answer within {timeout_s} s")
                if not (more := file.read(1 << 16)):
                    break
                data += more
        _, status = os.waitpid(pid, 0)
        if not data:
            return Outcome(error="Ended", text=f"status {status}", ended=status)
        return pickle.loads(data)

    def start_world(self, fn: Callable[[], Any], hosts: Sequence[int], **env: str) -> list[int]:
        """Starts `fn()` as the ranks of a world: rank i on hosts[i], with the variables for it."""
        world = {
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": self.address(hosts[0]),
            "MASTER_PORT": str(free_port()),
            "PYCOLL_TOKEN": TOKEN,
        }
        pids = []
        for rank, host in enumerate(hosts):
            own = {"RANK": str(rank), "LOCAL_RANK": str(list(hosts[:rank]).count(host))}
            pids.append(self.start(host, fn, **(world | own | env)))
        return pids

    def start_ranks(
        self, fn: Callable[..., Any], per_host: int, *args: Any, **env: str
    ) -> list[int]:
        """Starts `fn(comm, *args)` on `per_host` ranks of each host, host after host."""
        import pycoll

        timeout_s = float(env.pop("timeout_s", "20"))

        def rank_main() -> Any:
            with pycoll.init(timeout_s=timeout_s) as comm:
                return fn(comm, *args)

        hosts = [rank // per_host for rank in range(self.n * per_host)]
        return self.start_world(rank_main, hosts, **env)

    def outcomes(self, pids: Sequence[int], timeout_s: float = 60) -> list[Outcome]:
        return [self.outcome(pid, timeout_s) for pid in pids]

    def run(
        self, fn: Callable[..., Any], per_host: int = 1, *args: Any, **env: str
    ) -> list[Outcome]:
        return self.outcomes(self.start_ranks(fn, per_host, *args, **env))

    def run_jobs(
        self, jobs: Sequence[Callable[[Any], Any]], per_host: int = 1, **env: str
    ) -> list[tuple[Any, ...]]:
        """Runs `job(comm)` of each job, one after another in one world.

        Returns what the ranks returned, job after job. A failure names the job and every rank's
        error.
        """

        def work(comm: Any) -> list[Any]:
            results = []
            for job in jobs:
                try:
                    results.append(job(comm))
                except Exception as error:
                    name = getattr(job, "__name__", str(job))
                    text = traceback.format_exc(limit=-3)
                    raise AssertionError(f"{name}: {error!r}\n{text}") from error
            return results

        pids = self.start_ranks(work, per_host, **env)
        outcomes = self.outcomes(pids, timeout_s=250)
        results = values(outcomes)
        leaked = [one.fds_leaked for one in outcomes]
        assert max(leaked) <= 1, f"descriptors left open by each rank: {leaked}"  # NumPy opens one
        return list(zip(*results, strict=True))

    def command(self, host: int, words: list[str], **env: str) -> subprocess.Popen[str]:
        """Starts a program on that host."""
        into = ["nsenter", f"--net={NAMESPACES / self.namespace(host)}", "unshare", "--uts"]
        shell = f'hostname host{host}; exec "$@"'
        return subprocess.Popen(
            [*into, "sh", "-c", shell, "sh", *words],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        for pid in list(self._children):
            with contextlib.suppress(ProcessLookupError):
                self.kill(pid)
        for space in [*(self.namespace(host) for host in range(self.n)), self.switch]:
            if (NAMESPACES / space).exists():
                ip("netns", "del", space)


def _run(fn: Callable[[], Any]) -> Outcome:
    num_fds = len(os.listdir("/proc/self/fd"))
    start = time.monotonic()
    value, error = None, {}
    try:
        value = fn()
    except BaseException as raised:
        error = {
            "error": type(raised).__name__,
            "text": str(raised) or traceback.format_exc(),
            "rank": getattr(raised, "rank", -1),
        }
    gc.collect()  # a caught exception may hold a communicator in a cycle
    return Outcome(
        value=value,
        seconds=time.monotonic() - start,
        fds_leaked=len(os.listdir("/proc/self/fd")) - num_fds,
        **error,
    )


def launcher_script(network: Network) -> Path:
    """Writes a stand-in for ssh, called with an address and a command. The caller removes it."""
    path = Path(f"/run/{network.name}{os.getpid()}.sh")
    space = NAMESPACES / network.namespace(0)
    path.write_text(
        "#!/bin/sh\n"
        f"host=$((${{1##*.}} - 1)); shift\n"
        f"exec nsenter --net={str(space)[:-1]}$host unshare --uts "
        """sh -c 'hostname "$0"; exec sh -c "$*"' host$host "$@"\n"""
    )
    path.chmod(0o755)
    return path


_ports: Iterator[int] = iter(range(21000 + os.getpid() % 5000, 32000))


def free_port() -> int:
    """A port of this test alone: namespaces share no ports with other programs."""
    return next(_ports)


__all__ = ["TOKEN", "Network", "Outcome", "free_port", "launcher_script", "values", "why_not"]
