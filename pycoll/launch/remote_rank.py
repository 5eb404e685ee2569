"""One rank of `pycoll run --hosts` on its host: python -m pycoll.launch.remote_rank.

Reads its order from standard input; when the input ends, the rank is ended.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

from pycoll.launch.processes import RankProcess, end_all

_PART = 1 << 16


class _Ended(BaseException):
    """A signal that ends this process."""


def _raise(signum: int, frame: FrameType | None) -> None:
    raise _Ended


def main() -> int:
    """Runs the rank; returns its exit status, or 128 plus the signal that killed it."""
    order = json.loads(sys.stdin.buffer.readline() or b"null")
    if order is None:
        return 1
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, _raise)
    processes: list[RankProcess] = []
    try:
        RankProcess.start(int(order["env"]["RANK"]), lambda: _become(order), into=processes)
        return _watch(processes[0])
    except _Ended:
        return 1
    finally:
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        end_all(processes, order["grace_s"])


def _become(order: dict[str, Any]) -> NoReturn:
    """Replaces the child process with the script."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(order["argv"][0], order["argv"], {**os.environ, **order["env"]})


def _watch(process: RankProcess) -> int:
    with selectors.DefaultSelector() as selector:
        selector.register(process.pidfd, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == process.pidfd:
                    status = process.exit_status() or 0
                    return status if status >= 0 else 128 - status
                if not os.read(0, _PART):
                    raise _Ended


if __name__ == "__main__":
    sys.exit(main())
