"""A job: all ranks of one library, started once, asleep except in their turns."""

from __future__ import annotations

import glob
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import Library, PeerError

from pycoll.bench.case import Case

START_TIMEOUT_S = 120.0
TURN_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
# In a process group of its own, so that Ctrl-C reaches the driver alone, which cleans up. Not in
# a session of its own: Linux shares the processor out among sessions (autogroups), and a yield of
# one rank would not let a rank of another session run.
OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
)


class UnsupportedError(Exception):
    """The library has no such collective or dtype: no failure, it is left out of that part."""


class Job:
    """The running ranks of one library, each at the other end of a control connection.

    The connections are Unix sockets with an abstract name: nothing is left on disk. A rank that
    loses its connection ends, so that killing the driver ends every job.
    """

    def __init__(self, library: Library, n: int, bench_dir: Path) -> None:
        self.library, self.n = library, n
        self._processes: list[subprocess.Popen[bytes]] = []
        self._streams: list[Any] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed in stop)
        self._litter = ""
        address = f"pycoll-compare-{secrets.token_hex(8)}"
        server = socket.socket(socket.AF_UNIX)
        server.bind("\0" + address)
        server.listen(n)
        try:
            for command, settings in library.commands(n, bench_dir, address):
                self._litter = library.litter.format_map(settings)
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=os.environ | settings,
                        stdin=subprocess.DEVNULL,
                        stdout=self._output,
                        stderr=self._output,
                        **OWN_GROUP,
                    )
                )
            self.hello = self._accept(server)
        except BaseException:
            self.stop()
            raise
        finally:
            server.close()

    def _accept(self, server: socket.socket) -> list[dict[str, Any]]:
        """Waits for all ranks and checks that each is a rank of the right library and world."""
        deadline = time.monotonic() + START_TIMEOUT_S
        server.settimeout(0.1)
        while len(self._streams) < self.n:
            with suppress(TimeoutError):
                connection = server.accept()[0]
                connection.settimeout(TURN_TIMEOUT_S)
                self._streams.append(connection.makefile("rw", encoding="utf-8"))
            if any(process.poll() is not None for process in self._processes):
                raise self._error("a process ended before all ranks had started")
            if time.monotonic() > deadline:
                raise self._error(
                    f"{len(self._streams)} of {self.n} ranks after {START_TIMEOUT_S} s"
                )
        hello = [self._receive(stream) for stream in self._streams]
        for rank in hello:
            if "unsupported" in rank:
                raise UnsupportedError(rank["unsupported"])
        if sorted(rank["rank"] for rank in hello) != list(range(self.n)):
            raise self._error(f"expected ranks 0..{self.n - 1}, got {[r['rank'] for r in hello]}")
        for rank in hello:
            if not rank["version"].startswith(self.library.version_marker):
                raise self._error(
                    f"wrong library: expected {self.library.version_marker!r}, "
                    f"got {rank['version']!r}"
                )
        return hello

    def _error(self, what: str) -> PeerError:
        """The error to raise, with the end of what the ranks printed."""
        time.sleep(0.2)  # A rank that has just failed may still be printing why.
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").strip()[-3000:]
        return PeerError(f"{self.library.name}, {self.n} ranks: {what}\n{printed}")

    def _receive(self, stream: Any) -> dict[str, Any]:
        try:
            line = stream.readline()
        except TimeoutError as error:
            raise self._error(f"no answer in {TURN_TIMEOUT_S} s") from error
        except OSError as error:
            raise self._error(f"a rank is gone ({error})") from error
        if not line:
            raise self._error("a rank ended without an answer")
        return json.loads(line)

    def _ask(self, **request: Any) -> list[dict[str, Any]]:
        """Sends one request to every rank and returns their answers."""
        try:
            for stream in self._streams:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
        except OSError as error:
            raise self._error(f"a rank is gone ({error})") from error
        return [self._receive(stream) for stream in self._streams]

    def prepare(self, case: Case) -> None:
        """Makes every rank's buffers for a message.

        Raises:
            UnsupportedError: The library cannot do that.
            PeerError: A rank is gone.
        """
        for answer in self._ask(do="prepare", case=asdict(case)):
            if "unsupported" in answer:
                raise UnsupportedError(answer["unsupported"])

    def check(self) -> None:
        """Compares one call with the exact result, on every rank.

        Raises:
            PeerError: A rank got a wrong element, or is gone.
        """
        for answer in self._ask(do="check"):
            if answer["wrong"]:
                raise self._error(f"wrong result: {answer['wrong']}")

    def time_blocks(self, warmup: int, num_calls: int, num_blocks: int) -> list[float]:
        """Times blocks of calls; returns the seconds of each by the slowest rank."""
        answers = self._ask(do="time", warmup=warmup, num_calls=num_calls, num_blocks=num_blocks)
        return [max(ranks_s) for ranks_s in zip(*(a["times_s"] for a in answers), strict=True)]

    def stop(self) -> None:
        """Ends all processes: first by closing the connections, then by signals."""
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        ranks = [rank["pid"] for rank in getattr(self, "hello", [])]
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                for pid in (-process.pid, *ranks):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
        for path in glob.glob(self._litter):
            with suppress(OSError):
                os.unlink(path)
        self._output.close()
