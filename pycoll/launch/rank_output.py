"""The output streams of ranks, forwarded by whole lines with the rank before each."""

from __future__ import annotations

import os
from dataclasses import dataclass

_PIPE_BYTES = 1 << 16  # capacity of a pipe


@dataclass(slots=True)
class Output:
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


__all__ = ["Output"]
