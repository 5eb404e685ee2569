"""A save whose files a thread writes while training goes on.

No rank communicates in its thread, because collectives of two threads would mix. Each rank reports
in the new folder that its file is on the disk; the thread of rank 0 waits for all reports, writes
the index, and gives the folder its name. Until then the checkpoint before is the newest.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pycoll import threads
from pycoll.communicator import Communicator
from pycoll.errors import SystemError
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.trainer.checkpoint_files import write_index
from pycoll.parallel.trainer.checkpoint_folders import finish

_POLL_S = 0.002
_GRACE_S = 30.0  # for the other ranks' files, after this process's script has ended


class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: The checkpoint's folder, once it is complete.
    """

    def __init__(
        self,
        world: Communicator,
        path: Path,
        making: Path,
        write: Callable[[], tuple[str, str]],
        index: dict[str, Any],
        keep: int,
    ) -> None:
        """Starts the thread.

        Args:
            world: All ranks of the mesh.
            path: The checkpoint's folder.
            making: The folder in which it is made.
            write: Writes this rank's file; returns its name and the checksum of its header.
            index: Content of `index.json` without the files.
            keep: Number of newest checkpoints to keep.
        """
        self.path = path
        self._world, self._making, self._write = world, making, write
        self._index, self._keep = index, keep
        self._problem = self._unfinished = ""  # what failed here, and in rank 0's last part
        self._written, self._stop = threading.Event(), threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._run, name="pycoll-save")
        threads.start(self._thread, "the thread that writes a checkpoint")

    def wait(self) -> Path:
        """Waits until the checkpoint is complete. Collective; the next save or load does it, too.

        Returns:
            The checkpoint's folder.

        Raises:
            SystemError: A rank could not write; the checkpoints before are unchanged.
        """
        if self._done:
            return self.path
        self._done = True
        self._written.wait()
        try:
            problems = gather_objects(self._problem, self._world)  # so that a death is noticed
        except BaseException:
            self._stop.set()
            raise
        failed = sum(map(bool, problems))
        if failed:
            self._stop.set()
        self._thread.join()
        unfinished = gather_objects(self._unfinished, self._world)[0]
        if failed or unfinished:
            mine = problems[self._world.rank] or (unfinished if self._world.rank == 0 else "")
            raise SystemError(
                f"save: {failed or 1} of {self._world.size} ranks could not write to "
                f"{self._making}" + (f"; this one: {mine}" if mine else "")
            )
        return self.path

    def _run(self) -> None:
        try:
            self._report(*self._write())
        except Exception as error:  # an error of a thread must reach `wait`
            self._problem = str(error) or type(error).__name__
            with contextlib.suppress(OSError):
                self._report("", "")
        self._written.set()
        if self._world.rank == 0:
            self._finish()

    def _report(self, name: str, header: str) -> None:
        """Tells rank 0: a file of this name and checksum, or, with an empty name, a failure."""
        path = self._report_of(self._world.rank)
        unnamed = path.with_suffix(".new")
        unnamed.write_text(json.dumps([name, header]))
        unnamed.rename(path)

    def _report_of(self, rank: int) -> Path:
        return self._making / f"report-{rank:05d}.json"

    def _finish(self) -> None:
        """Completes the checkpoint, or removes it, once all ranks have reported."""
        try:
            reports = [self._wait_for(rank) for rank in range(self._world.size)]
            files = {name: header for name, header in filter(None, reports) if name}
            if len(files) < self._world.size:
                shutil.rmtree(self._making, ignore_errors=True)
                return
            for rank in range(self._world.size):
                self._report_of(rank).unlink()
            write_index(self._making, {**self._index, "files": files})
            finish(self._making, self._keep)
        except Exception as error:
            self._unfinished = str(error) or type(error).__name__
            shutil.rmtree(self._making, ignore_errors=True)

    def _wait_for(self, rank: int) -> list[str] | None:
        """A rank's report; None if there will be none."""
        path, alive_s = self._report_of(rank), time.monotonic()
        while not path.exists():
            if threading.main_thread().is_alive():
                alive_s = time.monotonic()
            if self._stop.is_set() or time.monotonic() - alive_s > _GRACE_S:
                return None
            time.sleep(_POLL_S)
        report: list[str] = json.loads(path.read_text())
        return report


__all__ = ["Saving"]
