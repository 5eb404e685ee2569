"""Ranks that run a script: starts them, forwards their output, and ends all after a failure."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

from pycoll.launch import preloaded
from pycoll.launch.ending_signals import Ended, signals_ignored, signals_raise
from pycoll.launch.processes import RankProcess, World, describe_exit, end_all
from pycoll.launch.rank_output import Output
from pycoll.launch.remote_hosts import Hosts

_WAY_S = 2.0  # time to another host and back


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Launch:
    def __init__(
        self,
        argv: list[str],
        world: World | Hosts,
        extra: dict[str, str],
        prefix: bool,
        grace_s: float,
    ) -> None:
        self._argv = argv
        self._world = world
        self._extra = extra
        self._prefix = prefix
        self._grace_s = grace_s
        self._processes: list[RankProcess] = []
        self._outputs: list[Output] = []
        self._open_inputs: list[int] = []
        self._main: Callable[[Mapping[str, str]], int] | None = None  # runs the script in a fork
        self._selector = selectors.DefaultSelector()
        self._running = 0
        self._failed = 0  # the exit status of the command
        self._due_s: float | None = None  # when `_when_due` is called

    def preload(self, command: list[str], module: bool) -> None:
        """Imports what the script imports, if it is slow to import, so that ranks are forks."""
        if not (modules := preloaded.modules_of(command, module)):
            return
        if reason := preloaded.import_all(modules, self._extra):
            _say(f"pycoll run: each rank imports torch for itself: {reason}")
            return
        self._main = partial(preloaded.run, command, module)

    def run(self) -> int:
        """Starts all ranks, waits for them, and returns the command's exit status."""
        with signals_raise():
            try:
                for rank in range(self._world.size):
                    self._start(rank)
                return self._watch()
            except Ended as ended:
                name = signal.Signals(ended.signum).name
                _say(f"pycoll run: {name}: ending all ranks")
                return 128 + ended.signum
            finally:
                with signals_ignored():
                    self._end()
                    self._world.close()
                    self._selector.close()
                    for output in self._outputs:
                        output.finish()

    def _end(self) -> None:
        end_all(self._processes, self._grace_s)

    def _start(self, rank: int) -> None:
        label = f"[{rank}] ".encode()
        write_ends = []
        for to in (1, 2) if self._prefix else ():
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            self._outputs.append(output := Output(read_end, to, label))
            self._selector.register(read_end, selectors.EVENT_READ, output)
            write_ends.append(write_end)
        RankProcess.start(rank, lambda: self._rank_main(rank, write_ends), into=self._processes)
        self._selector.register(
            self._processes[-1].pidfd, selectors.EVENT_READ, self._processes[-1]
        )
        self._running += 1
        for write_end in write_ends:
            os.close(write_end)

    def _rank_main(self, rank: int, write_ends: list[int]) -> int:
        """Replaces the child process with the script, or runs it here."""
        for to, write_end in enumerate(write_ends, start=1):
            os.dup2(write_end, to)
        return self._become(rank, write_ends)

    def _become(self, rank: int, write_ends: list[int]) -> int:
        # A background process group is stopped when it reads from the terminal.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        environment = {**os.environ, **self._environment(rank)}
        if self._prefix:
            environment.setdefault("PYTHONUNBUFFERED", "1")
        if self._main is not None:
            self._close_inherited([nothing, *write_ends])
            return self._main(environment)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(self._argv[0], self._argv, environment)

    def _environment(self, rank: int) -> Mapping[str, str]:
        return {**self._world.environment(rank), **self._extra}

    def _close_inherited(self, fds: list[int]) -> None:
        """Closes what an exec would close."""
        self._selector.close()
        outputs = [output.pipe for output in self._outputs]
        for fd in (*fds, *outputs, *(process.pidfd for process in self._processes)):
            os.close(fd)
        self._world.close()

    def _hint(self, rank: int, status: int) -> str:
        return ""

    def _watch(self) -> int:
        """Forwards output until all ranks have ended, or `_when_due` says that it is enough."""
        while self._running:
            wait_s = None if self._due_s is None else self._due_s - time.monotonic()
            if wait_s is not None and wait_s <= 0:
                if self._when_due():
                    break
                continue
            for key, _ in self._selector.select(wait_s):
                if isinstance(key.data, Output):
                    if not key.data.forward():
                        self._selector.unregister(key.fd)
                    continue
                self._selector.unregister(key.fd)
                self._running -= 1
                self._when_ended(key.data.rank, key.data.exit_status())
        return self._failed

    def _when_ended(self, rank: int, status: int) -> None:
        """A rank has ended: its exit status, or minus a signal."""
        if status and not self._failed:
            self._failed = status if status > 0 else 128 - status
            self._due_s = time.monotonic() + self._grace_s
            self._say_how(rank, status)

    def _when_due(self) -> bool:
        """True: the ranks that still run are ended."""
        _say(
            f"pycoll run: ending {self._running} ranks that still run {self._grace_s:g} s after "
            "the first failure"
        )
        return True

    def _say_how(self, rank: int, status: int, then: str = "") -> None:
        how = f"{describe_exit(status)}{self._hint(rank, status)}"
        _say(f"pycoll run: rank {rank} of {self._world.size} {how}{then}")


class RemoteLaunch(Launch):
    """A launch with ranks on several hosts: the local processes are ssh."""

    _world: Hosts

    def _start(self, rank: int) -> None:
        if self._prefix:
            self._extra.setdefault("PYTHONUNBUFFERED", "1")
        self._input, orders = os.pipe()
        os.write(orders, self._world.order(rank, self._argv, self._extra, self._grace_s))
        super()._start(rank)
        os.close(self._input)
        # Open as long as this command lives: the rank ends when this input ends.
        self._open_inputs.append(orders)

    def _end(self) -> None:
        for orders in self._open_inputs:
            os.close(orders)
        # The remote ranks end first, each after its grace period, then the local processes.
        deadline = time.monotonic() + self._grace_s + _WAY_S
        while time.monotonic() < deadline and any(p.exit_status() is None for p in self._processes):
            time.sleep(0.01)
        super()._end()

    def _become(self, rank: int, write_ends: list[int]) -> NoReturn:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.dup2(self._input, 0)
        command = self._world.command(rank)
        os.execvp(command[0], command)

    def _hint(self, rank: int, status: int) -> str:
        return f" on host {self._world.place(rank)[0]}{self._world.hint(rank, status)}"


__all__ = ["Launch", "RemoteLaunch"]
