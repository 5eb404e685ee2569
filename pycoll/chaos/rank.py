"""Runs a script and notes what its elastic training does.

python -m pycoll.chaos.rank FD SCRIPT [ARGS]...

Each note is a line of JSON in the pipe FD. See `Note` in pycoll/chaos/notes.py.
"""

from __future__ import annotations

import functools
import hashlib
import os
import runpy
import sys
import time
from typing import Any

from pycoll.chaos.notes import Note
from pycoll.parallel.recovery.job import Job
from pycoll.parallel.trainer.gather_full import whole_weights


def digest(job: Job) -> str:
    """A hash of the bits of all weights. Collective."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in sorted(whole_weights(job.model).items()):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


def watch(pipe: int) -> None:
    """Notes each set of ranks, each commit, and the weights at the end."""
    patched: Any = Job
    begin, take_in, finish = patched.begin, patched._take_in, patched.finish
    takes_in = False  # whether new ranks come in, before which the job finishes, too

    def note(job: Job, what: str, text: str = "") -> None:
        world = job.mesh.world
        written = Note(
            what, job.commits, time.monotonic(), os.getpid(), world.rank, world.size, text
        )
        os.write(pipe, written.to_line())  # short enough to be written at once

    @functools.wraps(begin)
    def noted_begin(job: Job, *args: Any) -> None:
        begin(job, *args)
        note(job, "built")

    @functools.wraps(take_in)
    def noted_take_in(job: Job) -> None:
        """The end of `commit` and of `update`."""
        nonlocal takes_in
        note(job, "committed")
        takes_in = True
        try:
            take_in(job)
        finally:
            takes_in = False

    @functools.wraps(finish)
    def noted_finish(job: Job) -> None:
        finish(job)
        if not takes_in:
            note(job, "finished", digest(job))

    patched.begin, patched._take_in, patched.finish = noted_begin, noted_take_in, noted_finish


def main() -> None:
    watch(int(sys.argv[1]))
    del sys.argv[:2]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
