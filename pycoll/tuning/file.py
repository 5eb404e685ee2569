"""The table's file: one per machine, replaced as a whole."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pycoll import _core
from pycoll.errors import SystemError, UsageError


def path() -> Path:
    """The file of this machine's table.

    In PYCOLL_CACHE_DIR, else XDG_CACHE_HOME/pycoll, else HOME/.cache/pycoll.

    Raises:
        UsageError: None of the three is set.
    """
    found = _core.tuning_table_path()
    if not found:
        raise UsageError("set PYCOLL_CACHE_DIR to a folder for the table: HOME is not set")
    return Path(found)


def load() -> tuple[_core.TuningTable, str]:
    """This machine's table as it is in the file now.

    Returns:
        The table, empty when there is none of this version and machine; and where it is from, or
        why it is empty.
    """
    note = _core.tuning_table_note()
    if note == str(path()):
        with suppress(OSError, UnicodeDecodeError, UsageError):  # replaced meanwhile
            return _core.TuningTable.parse(path().read_text("ascii")), note
    return _core.TuningTable([], []), note


def save(costs: Iterable[_core.TunedCost], sizes: Iterable[_core.TunedSize]) -> Path:
    """Puts rows into this machine's table, in place of those they are newer than.

    Several processes may do so at once: each holds a lock while it reads the table, adds its rows
    and puts the new table in the old one's place. A reader sees the whole old table or the whole
    new one.

    Args:
        costs: One for each protocol, number of ranks and cores, and kind of arrays.
        sizes: One for each collective, number of ranks and cores, kind of arrays, and size.

    Returns:
        The file.

    Raises:
        SystemError: The folder or the file cannot be written.
    """
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            old, _ = load()
            text = _merged(old, costs, sizes).to_text()
            _replace(target, text)
    except OSError as error:
        raise SystemError(f"cannot write the table {target}: {error}") from error
    return target


def _merged(
    old: _core.TuningTable, costs: Iterable[_core.TunedCost], sizes: Iterable[_core.TunedSize]
) -> _core.TuningTable:
    def cost_key(row: _core.TunedCost) -> tuple[int, int, str, str]:
        return row.num_ranks, row.num_cores, row.arrays, row.protocol

    def size_key(row: _core.TunedSize) -> tuple[str, int, int, str, int]:
        return row.collective, row.num_ranks, row.num_cores, row.arrays, row.nbytes

    all_costs = {cost_key(row): row for row in (*old.costs, *costs)}
    all_sizes = {size_key(row): row for row in (*old.sizes, *sizes)}
    return _core.TuningTable(
        [all_costs[key] for key in sorted(all_costs)],
        [all_sizes[key] for key in sorted(all_sizes)],
    )


def _replace(target: Path, text: str) -> None:
    """Puts the text in the file's place, for a caller that holds the lock."""
    new = target.with_suffix(".new")  # of one name: the next save replaces what a killed one left
    try:
        with open(new, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
    # Without it the folder may forget the new name when the machine loses power.
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def today() -> str:
    """The date of a row: `2026-11-21T14:30:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
