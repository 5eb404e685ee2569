"""Handles on operations that run beside the caller."""

from __future__ import annotations

import time
from typing import Any

from pycoll import _core
from pycoll.errors import TimeoutError

_SLICE_S = 0.05


class Work:
    """A handle on an operation that was started with `async_op=True`.

    The arrays of the call must not be read or written until it is done.
    """

    def __init__(
        self, core: _core.Work | _core.MessageWork | _core.DeviceWork, result: Any
    ) -> None:
        self._core = core
        self._result = result

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits until the operation is over.

        Of arrays of a device, without `timeout_s` it is their library's current stream that waits,
        and not the host: what the stream gets from now on comes behind the operation.

        Args:
            timeout_s: How long to wait here, seconds. None: as long as the operation itself may
                take, which is the communicator's timeout.

        Returns:
            The result array of the call.

        Raises:
            TimeoutError: The operation is still running after `timeout_s`; it goes on.
            Error: What ended the operation.
        """
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
        """True when it is over, well or not."""
        return self._core.done()

    def exception(self) -> BaseException | None:
        """What ended it, None while it runs and after success."""
        return self._core.exception()

    @property
    def source(self) -> int | None:
        """Of a receive that is over: the rank whose message it got. Else None."""
        return self._core.source if isinstance(self._core, _core.MessageWork) else None


__all__ = ["Work"]
