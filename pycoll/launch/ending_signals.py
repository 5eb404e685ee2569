"""Signals that end a launcher: raised as an exception while ranks run, ignored while they end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Ended(BaseException):
    """A signal that ends the command itself."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def signals_raise() -> Iterator[None]:
    def handler(signum: int, frame: FrameType | None) -> None:
        raise Ended(signum)

    with _handling(handler):
        yield


@contextmanager
def signals_ignored() -> Iterator[None]:
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


__all__ = ["Ended", "signals_ignored", "signals_raise"]
