"""The folder of checkpoints: which it holds, and how they are put in place and removed.

A checkpoint is made in `.making-step-N`, which is renamed to `step-N` when all data is on the disk.
A checkpoint of the same step waits in `.old-step-N` meanwhile. A removal begins with `index.json`,
so that a checkpoint with an index is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pycoll.parallel.trainer.checkpoint_files import INDEX, fsync

_MAKING, _OLD = ".making-", ".old-"


def checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(path for path in Path(folder).glob("step-*") if (path / INDEX).exists())


def newest(folder: str | Path) -> Path | None:
    """The newest checkpoint in a folder, or the folder itself; None if there is none."""
    if (Path(folder) / INDEX).exists():
        return Path(folder)
    return next(reversed(checkpoints(folder)), None)


def candidates(folder: Path) -> list[Path]:
    """What a load may read, newest first: also a checkpoint that was being replaced."""
    if (folder / INDEX).exists():
        return [folder]
    by_name = {path.name.removeprefix(_OLD): path for path in folder.glob(f"{_OLD}step-*")}
    by_name |= {path.name: path for path in folder.glob("step-*") if path.is_dir()}
    return [by_name[name] for name in sorted(by_name, reverse=True)]


def begin(folder: Path, name: str) -> Path:
    """Removes what killed saves left, and returns a new folder for the files of a checkpoint.

    Raises:
        OSError: The folder cannot be made.
    """
    for old in folder.glob(f"{_OLD}step-*"):
        final = folder / old.name.removeprefix(_OLD)
        if (old / INDEX).exists() and not (final / INDEX).exists():  # killed while it was replaced
            shutil.rmtree(final, ignore_errors=True)
            old.rename(final)
    litter = [*folder.glob(f"{_MAKING}step-*"), *folder.glob(f"{_OLD}step-*")]
    litter += [path for path in folder.glob("step-*") if not (path / INDEX).exists()]
    for path in litter:
        remove(path)
    making = folder / f"{_MAKING}{name}"
    making.mkdir(parents=True)
    return making


def finish(making: Path, keep: int) -> Path:
    """Gives a checkpoint its name, and removes all but the `keep` newest and this one.

    Raises:
        OSError: The folder cannot be renamed.
    """
    folder, name = making.parent, making.name.removeprefix(_MAKING)
    final, old = folder / name, folder / f"{_OLD}{name}"
    if final.exists():
        final.rename(old)
    making.rename(final)
    fsync(folder)
    for path in [old, *checkpoints(folder)[:-keep]]:
        if path != final:
            remove(path)
    return final


def remove(path: Path) -> None:
    """Removes a checkpoint, its index first; what cannot be removed stays until the next save."""
    if path.is_dir():
        try:
            (path / INDEX).unlink(missing_ok=True)
        except OSError:
            return
        shutil.rmtree(path, ignore_errors=True)


__all__ = ["begin", "candidates", "checkpoints", "finish", "newest", "remove"]
