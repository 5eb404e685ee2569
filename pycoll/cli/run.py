"""`pycoll run`: runs a script on n ranks on one or more hosts. No rank outlives the command."""

from __future__ import annotations

import math
import os
import selectors
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pycoll.launch.processes import RankProcess, World
    from pycoll.launch.remote_hosts import Hosts

EPILOG = """[bold]Examples[/bold]

  pycoll run -n 4 train.py --epochs 3

  pycoll run -n 2 -m my_package.train

  pycoll run -n 4 --no-prefix train.py

  pycoll run -n 4 --no-preload train.py

  pycoll run --mesh dp=2,tp=2,pp=2 train.py

  pycoll run -n 4 --replicas local:steps=50,compress=int8 train.py

  pycoll run -n 4 --hosts a,b train.py
"""

CONTEXT = {"allow_interspersed_args": False}  # options after SCRIPT belong to the script


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")
    ],
    n: Annotated[int | None, typer.Option("-n", help="Number of ranks; default 2.", min=1)] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Axes of pycoll.parallel, such as dp=2,tp=2,pp=2: overrides the script's mesh, "
            "and sets the number of ranks where -n is not given."
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="How replicas of pycoll.parallel stay together: allreduce, gossip, local or ps, "
            "with options such as local:steps=50: overrides the script's replicas."
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Hosts, such as a,b: each starts its share of the ranks through ssh. This Python, "
            "pycoll and the script must have the same paths there, and all hosts must reach the "
            "first host by its name."
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(
            help="Command to use instead of ssh, with options: gets a host and a command line. "
            "Also PYCOLL_SSH."
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")
    ] = False,
    prefix: Annotated[
        bool, typer.Option("--prefix/--no-prefix", help="Start each line of output with the rank.")
    ] = True,
    preload: Annotated[
        bool,
        typer.Option(
            "--preload/--no-preload",
            help="Import torch once, if the script imports it, and fork the ranks afterwards. "
            "Variables that libraries read when they are imported must be set before.",
        ),
    ] = True,
    grace: Annotated[
        float,
        typer.Option(
            help="Seconds from the first failure to SIGTERM for the other ranks, and from SIGTERM "
            "to SIGKILL.",
            min=0.0,
        ),
    ] = 5.0,
) -> None:
    """Run a Python script on n ranks; exit with the status of the first rank that fails.

    The command sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and PYCOLL_TOKEN for
    each rank; `pycoll.init()` reads them.
    """
    from pycoll.launch.processes import World

    extra = {}
    if mesh is not None:
        from pycoll.parallel.core.mesh import infer_sizes, parse_sizes

        sizes = parse_sizes(mesh)
        n = math.prod(infer_sizes(sizes, n or math.prod(sizes.values())).values())
        extra["PYCOLL_MESH"] = mesh
    if replicas is not None:
        extra["PYCOLL_REPLICAS"] = replicas
    n = 2 if n is None else n
    if n > 1 and "OMP_NUM_THREADS" not in os.environ:
        extra["OMP_NUM_THREADS"] = "1"
        typer.echo(
            f"pycoll run: OMP_NUM_THREADS=1 for each of {n} ranks; set it to use more threads",
            err=True,
        )
    argv = [sys.executable, *(["-m"] if module else []), *command]
    if hosts is None:
        launch = _Launch(argv, World(n), extra, prefix, grace)
        if preload and n > 1:
            launch.preload(command, module)
        raise typer.Exit(launch.run())
    from pycoll.errors import UsageError
    from pycoll.launch.remote_hosts import Hosts

    try:
        world = Hosts.parse(hosts, n, ssh)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(_RemoteLaunch(argv, world, extra, prefix, grace).run())


_PIPE_BYTES = 1 << 16  # capacity of a pipe
_WAY_S = 2.0  # time to another host and back


class _Ended(BaseException):
    """A signal that ends the command itself."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(slots=True)
class _Output:
    """One output stream of one rank, forwarded by whole lines."""

    pipe: int
    to: int
    label: bytes
    rest: bytes = b""

    def forward(self) -> bool:
        """Forwards the available output; False at the end."""
        try:
            part = os.read(self.pipe, _PIPE_BYTES)
        except BlockingIOError:
            return True
        *lines, self.rest = (self.rest + part).split(b"\n")
        self._write(lines)
        return bool(part)

    def finish(self) -> None:
        """Forwards the remaining output, even without a newline."""
        self.forward()
        self._write([self.rest] if self.rest else [])
        os.close(self.pipe)

    def _write(self, lines: list[bytes]) -> None:
        data = b"".join(self.label + line + b"\n" for line in lines)
        while data:
            data = data[os.write(self.to, data) :]


class _Launch:
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
        self._outputs: list[_Output] = []
        self._open_inputs: list[int] = []
        self._main: Callable[[Mapping[str, str]], int] | None = None  # runs the script in a fork

    def preload(self, command: list[str], module: bool) -> None:
        """Imports what the script imports, if it is slow to import, so that ranks are forks."""
        from pycoll.launch import preloaded

        if not (modules := preloaded.modules_of(command, module)):
            return
        if reason := preloaded.import_all(modules, self._extra):
            typer.echo(f"pycoll run: each rank imports torch for itself: {reason}", err=True)
            return
        self._main = partial(preloaded.run, command, module)

    def run(self) -> int:
        """Starts all ranks, waits for them, and returns the command's exit status."""
        with _signals_raise():
            try:
                for rank in range(self._world.size):
                    self._start(rank)
                return self._watch()
            except _Ended as ended:
                name = signal.Signals(ended.signum).name
                typer.echo(f"pycoll run: {name}: ending all ranks", err=True)
                return 128 + ended.signum
            finally:
                with _signals_ignored():
                    self._end()
                    self._world.close()
                    for output in self._outputs:
                        output.finish()

    def _end(self) -> None:
        from pycoll.launch.processes import end_all

        end_all(self._processes, self._grace_s)

    def _start(self, rank: int) -> None:
        from pycoll.launch.processes import RankProcess

        label = f"[{rank}] ".encode()
        write_ends = []
        for to in (1, 2) if self._prefix else ():
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            self._outputs.append(_Output(read_end, to, label))
            write_ends.append(write_end)
        RankProcess.start(rank, lambda: self._rank_main(rank, write_ends), into=self._processes)
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
        environment = {**os.environ, **self._world.environment(rank), **self._extra}
        if self._prefix:
            environment.setdefault("PYTHONUNBUFFERED", "1")
        if self._main is not None:
            self._close_inherited([nothing, *write_ends])
            return self._main(environment)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(self._argv[0], self._argv, environment)

    def _close_inherited(self, fds: list[int]) -> None:
        """Closes what an exec would close."""
        outputs = [output.pipe for output in self._outputs]
        for fd in (*fds, *outputs, *(process.pidfd for process in self._processes)):
            os.close(fd)
        self._world.close()

    def _hint(self, rank: int, status: int) -> str:
        return ""

    def _watch(self) -> int:
        """Forwards output until all ranks have ended, or the grace period after a failure ends."""
        from pycoll.launch.processes import describe_exit

        failed = 0
        deadline: float | None = None
        running = len(self._processes)
        with selectors.DefaultSelector() as selector:
            for output in self._outputs:
                selector.register(output.pipe, selectors.EVENT_READ, output)
            for process in self._processes:
                selector.register(process.pidfd, selectors.EVENT_READ, process)
            while running:
                wait_s = None if deadline is None else deadline - time.monotonic()
                if wait_s is not None and wait_s <= 0:
                    typer.echo(
                        f"pycoll run: ending {running} ranks that still run {self._grace_s:g} s "
                        "after the first failure",
                        err=True,
                    )
                    break
                for key, _ in selector.select(wait_s):
                    if isinstance(key.data, _Output):
                        if not key.data.forward():
                            selector.unregister(key.fd)
                        continue
                    selector.unregister(key.fd)
                    running -= 1
                    status = key.data.exit_status()
                    if status and not failed:
                        failed = status if status > 0 else 128 - status
                        deadline = time.monotonic() + self._grace_s
                        typer.echo(
                            f"pycoll run: rank {key.data.rank} of {self._world.size} "
                            f"{describe_exit(status)}{self._hint(key.data.rank, status)}",
                            err=True,
                        )
        return failed


class _RemoteLaunch(_Launch):
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


@contextmanager
def _signals_raise() -> Iterator[None]:
    def handler(signum: int, frame: FrameType | None) -> None:
        raise _Ended(signum)

    with _handling(handler):
        yield


@contextmanager
def _signals_ignored() -> Iterator[None]:
    with _handling(signal.SIG_IGN):
        yield


@contextmanager
def _handling(handler: object) -> Iterator[None]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(signum, handler) for signum in signals]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for signum, old in zip(signals, before, strict=True):
            signal.signal(signum, old)
