"""Groups of operations that are launched together."""

from __future__ import annotations

from types import TracebackType

from pycoll import _core


class Coalesced:
    """Context of `Communicator.coalesce`: launches its group at the end."""

    def __init__(self, comm: _core.Communicator) -> None:
        self._comm = comm
        self._outermost = False

    def __enter__(self) -> Coalesced:
        self._outermost = not self._comm._is_coalescing
        if self._outermost:
            self._comm._begin_batch()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._outermost:
            return
        if error is None:
            self._comm._run_batch()
        else:
            self._comm._drop_batch()
