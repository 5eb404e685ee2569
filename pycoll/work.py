"""Handles on asynchronous operations."""

from __future__ import annotations

import os
import time
from typing import Any

from pycoll import _core
from pycoll.arguments import wait_seconds
from pycoll.errors import TimeoutError, UsageError

_SLICE_S = 0.05
_process = object()  # a forked process gets another one


def _mark_process() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_mark_process)


class Work:
    """A handle on an operation that was started with `async_op=True`.

    The arrays of the call must not be read or written until the operation is done.
    """

    def __init__(
        self,
        core: _core.Work | _core.MessageWork | _core.DeviceWork,
        result: Any,
        communicator: Any = None,
    ) -> None:
        self._core = core
        self._result = result
        self._communicator = communicator  # must live until the operation has ended
        self._process = _process

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits until the operation has ended.

        For device arrays without `timeout_s`, the current stream of their library waits instead of
        the host: work that is queued on the stream later runs after the operation.

        Args:
            timeout_s: Longest wait, in seconds. None: the communicator's timeout, which limits the
                operation itself.

        Returns:
            The result array of the call.

        Raises:
            UsageError: `timeout_s` is no number; the operation continues.
            TimeoutError: The operation is still running after `timeout_s`; it continues.
            Error: The operation failed.
            UsageError: This process was forked while the operation was running.
        """
        self._check_process()
        if timeout_s is not None:
            timeout_s = wait_seconds(timeout_s)
        if isinstance(self._core, _core.DeviceWork) and timeout_s is None:
            while not self._core.given(_SLICE_S):
                pass
            self._core.hold()
            return self._result
        # In slices: between them Python looks for signals, so that Ctrl-C ends the wait.
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _SLICE_S if end is None else max(0.0, end - time.monotonic())
            if self._core.wait(min(left_s, _SLICE_S)):
                return self._result
            if end is not None and left_s <= _SLICE_S:
                raise TimeoutError(f"the operation is still running after {timeout_s:g} s")

    def done(self) -> bool:
        """True when the operation has ended, with or without an error."""
        self._check_process()
        return self._core.done()

    def exception(self) -> BaseException | None:
        """The error of a failed operation; None while it is running and after success."""
        self._check_process()
        return self._core.exception()

    def _check_process(self) -> None:
        if self._process is not _process:
            raise UsageError(
                "this operation belongs to the process that this one was forked from: its arrays "
                "never get the result here; wait in the parent"
            )

    @property
    def source(self) -> int | None:
        """The sender of the message of a finished receive, else None."""
        return self._core.source if isinstance(self._core, _core.MessageWork) else None


__all__ = ["Work"]
