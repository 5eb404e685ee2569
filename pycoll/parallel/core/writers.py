"""Writers of metrics: lines of JSON, and TensorBoard. `pc.log` calls them on rank 0."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from pycoll.errors import UsageError


class Writer(Protocol):
    """Takes the metrics of one step after the other."""

    def write(self, numbers: Mapping[str, float]) -> None:
        """Writes the numbers of a step; `numbers["step"]` is its number."""


class JsonLines:
    """A file with one JSON object per step; what is not finite becomes null."""

    def __init__(self, path: str | Path) -> None:
        """The file is made by the first `write`, so that only rank 0 makes one; it is added to."""
        self._path = Path(path)
        self._file: IO[str] | None = None

    def write(self, numbers: Mapping[str, float]) -> None:
        """Writes one line, which other programs can read at once."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a")
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, folder: str | Path) -> None:
        """Makes the writer; its files are made by the first `write`.

        Raises:
            UsageError: tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard: the package tensorboard is not installed: pip install tensorboard, "
                "or take pc.JsonLines"
            ) from None
        self._make: Any = SummaryWriter
        self._folder = str(folder)
        self._writer: Any = None

    def write(self, numbers: Mapping[str, float]) -> None:
        """Writes each number as a scalar of its name."""
        if self._writer is None:
            self._writer = self._make(self._folder)
        for key, value in numbers.items():
            if key != "step":
                self._writer.add_scalar(key, value, int(numbers["step"]))


__all__ = ["JsonLines", "TensorBoard", "Writer"]
