"""Finds the communicators of running processes and the state of their ranks, from outside.

A communicator's memory is a memfd that its processes keep open. It is read through /proc/PID/fd,
which needs permission to inspect the process. The processes themselves need not respond, except
for their Python stacks (pycoll.observe.stacks).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycoll import _core
from pycoll.errors import UsageError
from pycoll.observe import stacks

_MEMORY = "/memfd:pycoll"
_STACKS = f"/memfd:{stacks.MEMFD_NAME}"
_QUIET_S = 0.05  # a stack that has not grown for this long is complete
_STACK_S = 2.0  # longest wait for the first output of a process


@dataclass(slots=True)
class Rank:
    """One rank of a group, seen from outside."""

    rank: int
    pid: int | None  # None: the process does not exist or may not be inspected
    state: str  # absent, running, waiting, left, dead, stopped, elsewhere: on another host
    last: dict[str, Any] | None  # its newest record of a collective
    messages: list[dict[str, Any]]  # its newest record of a message, and those that are pending
    control: dict[str, Any]
    stack: str | None = None
    why_no_stack: str | None = None
    is_here: bool = True  # in this network namespace: other containers count as other hosts
    host: str | None = None  # pycoll doctor --hosts: the host's name on the command line

    @property
    def pending(self) -> list[dict[str, Any]]:
        """Pending messages, the oldest first."""
        return [message for message in self.messages if message["finished_ns"] is None]

    @property
    def newest(self) -> dict[str, Any] | None:
        """Record of the pending collective or message, else of the last one."""
        found = [*([self.last] if self.last else []), *self.messages]
        waits = [record for record in found if _is_waited_for(record)]
        return max(waits or found, key=lambda record: record["entered_ns"], default=None)


@dataclass(slots=True)
class Group:
    """A communicator, seen from outside."""

    name: str
    size: int
    now_ns: int
    failure: dict[str, Any] | None
    ranks: list[Rank]
    view: _core.SegmentView | None  # None: merged from several hosts

    @property
    def job(self) -> str:
        """Name of the job's first communicator, from which this one was split."""
        return self.name.partition(".")[0]

    @property
    def pids(self) -> list[int]:
        return sorted({rank.pid for rank in self.ranks if rank.pid is not None})

    def late(self, patience_s: float) -> list[Rank]:
        """Ranks that keep others waiting: those that have not entered an operation in which another
        rank has been for longer than the patience; else stopped or dead ranks that others need."""
        waiting = [
            rank.last["sequence"]
            for rank in self.ranks
            if rank.state == "waiting"
            and rank.last is not None
            and rank.last["finished_ns"] is None
            and self.now_ns - rank.last["entered_ns"] > patience_s * 1e9
        ]
        here = [rank for rank in self.ranks if rank.state != "left"]
        if not waiting:
            return self._awaited(patience_s, here)
        newest = max(waiting)
        return [rank for rank in here if rank.control["sequence"] < newest] or [
            rank for rank in here if rank.state in ("stopped", "dead")
        ]

    def _awaited(self, patience_s: float, here: list[Rank]) -> list[Rank]:
        """Ranks outside of any operation whose messages other ranks wait for."""
        awaited = {
            message["peer"]
            for rank in self.ranks
            for message in rank.pending
            if message["blocking"] and self.now_ns - message["entered_ns"] > patience_s * 1e9
        }
        return [rank for rank in here if rank.rank in awaited and rank.state != "waiting"]


def _is_waited_for(record: dict[str, Any]) -> bool:
    return record["finished_ns"] is None and record.get("blocking", True)


@dataclass(slots=True)
class Scan:
    """Results of a scan of all processes."""

    groups: list[Group] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # memory of other versions
    num_hidden: int = 0  # processes of other users


def scan() -> Scan:
    """Scans all processes that this user may inspect."""
    found = Scan()
    holders: dict[tuple[int, int], tuple[str, list[int]]] = {}
    for pid in _pids():
        try:
            for path, key in _memories(pid):
                holders.setdefault(key, (path, []))[1].append(pid)
        except PermissionError:
            found.num_hidden += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    for path, pids in holders.values():
        try:
            group = _group(_core.SegmentView(path), pids)
            # All ranks have closed it: only arrays of comm.empty() keep the memory.
            if any(rank.state != "left" for rank in group.ranks):
                found.groups.append(group)
        except UsageError as error:
            # A communicator that is still being set up is ignored; another version is reported.
            if "another version" in str(error):
                found.unreadable.append(str(error))
        except OSError:
            continue  # the process has ended meanwhile
    found.groups.sort(key=lambda group: (group.job, group.name))
    return found


def take_stack(rank: Rank) -> None:
    """Fills in the Python stacks of the rank's process, or the reason why they are missing."""
    pid, signum, fd = rank.pid, rank.control["stack_signal"], rank.control["stack_fd"]
    if pid is None or rank.state == "dead":
        rank.why_no_stack = "its process has ended"
    elif rank.state == "stopped":
        rank.why_no_stack = "its process is stopped: kill -CONT continues it"
    elif not signum:
        rank.why_no_stack = f"its process has {stacks.VARIABLE}=off, or uses that signal itself"
    else:
        try:
            rank.stack = _ask_for_stack(pid, signum, fd)
        except (OSError, UsageError) as error:
            rank.why_no_stack = str(error)
        if not rank.stack and rank.why_no_stack is None:
            rank.why_no_stack = f"its process did not answer within {_STACK_S:g} s"


def _ask_for_stack(pid: int, signum: int, fd: int) -> str:
    path = f"/proc/{pid}/fd/{fd}"
    process = os.pidfd_open(pid)
    try:
        # The pid may belong to another process now, which the signal would end.
        if not os.readlink(path).startswith(_STACKS) or not stacks.is_handled(pid, signum):
            raise UsageError("its process has no handler for the signal for stacks")
        with open(path, "r+b", buffering=0) as file:
            file.truncate(0)
            signal.pidfd_send_signal(process, signum)
            size, grown = 0, time.monotonic()
            while time.monotonic() - grown < (_QUIET_S if size else _STACK_S):
                time.sleep(0.005)
                if (now := os.fstat(file.fileno()).st_size) != size:
                    size, grown = now, time.monotonic()
            file.seek(0)
            text = file.read().decode(errors="replace")
            file.truncate(0)
            return text
    finally:
        os.close(process)


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            yield int(name)


def _memories(pid: int) -> Iterator[tuple[str, tuple[int, int]]]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(FileNotFoundError):
            target = os.readlink(path)
            if target.startswith(_MEMORY) and not target.startswith(_STACKS):
                status = os.stat(path)
                yield path, (status.st_dev, status.st_ino)


def _group(view: _core.SegmentView, pids: list[int]) -> Group:
    facts = view.group()
    # A rank records its pid in its own namespace.
    by_own_pid = {_own_pid(pid): pid for pid in set(pids)}
    ranks = []
    for control in view.ranks():
        pid = by_own_pid.get(control["pid"])
        records = view.records(control["rank"], 1)
        last = records[-1] if records else None
        messages = view.messages(control["rank"])
        messages = [m for m in messages if m["finished_ns"] is None or m is messages[-1]]
        waits = any(_is_waited_for(record) for record in [*records, *messages])
        state = _state(control, pid, waits)
        rank = Rank(control["rank"], pid, state, last, messages, control)
        rank.is_here = pid is not None and _network(pid) == _network(os.getpid())
        ranks.append(rank)
    return Group(facts["name"], facts["size"], facts["now_ns"], facts["failure"], ranks, view)


def _state(control: dict[str, Any], pid: int | None, waits: bool) -> str:
    if control["state"] != "here":
        return str(control["state"])
    if not control["pid"]:
        return "elsewhere"
    code = _process_state(pid)
    if code in "ZX":
        return "dead"
    if code in "Tt":
        return "stopped"
    return "waiting" if waits else "running"


def _process_state(pid: int | None) -> str:
    """State letter of /proc/PID/stat; X if the process does not exist."""
    if pid is None:
        return "X"
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _network(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def _own_pid(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


__all__ = ["Group", "Rank", "Scan", "scan", "take_stack"]
