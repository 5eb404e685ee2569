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
from pycoll.parallel.recovery.job import Job, NewRanks
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
    build, commit, finish = patched.__init__, patched.commit, patched.finish
    commits = False  # whether a commit runs, which also finishes before new ranks come in

    def note(job: Job, what: str, text: str = "") -> None:
        world = job.mesh.world
        written = Note(
            what, job.commits, time.monotonic(), os.getpid(), world.rank, world.size, text
        )
        os.write(pipe, written.to_line())  # short enough to be written at once

    @functools.wraps(build)
    def noted_build(job: Job, *args: Any, **options: Any) -> None:
        build(job, *args, **options)
        note(job, "built")

    @functools.wraps(commit)
    def noted_commit(job: Job) -> None:
        nonlocal commits
        commits = True
        try:
            commit(job)
        except NewRanks:
            note(job, "committed")
            raise
        finally:
            commits = False
        note(job, "committed")

    @functools.wraps(finish)
    def noted_finish(job: Job) -> None:
        finish(job)
        if not commits:
            note(job, "finished", digest(job))

    patched.__init__, patched.commit, patched.finish = noted_build, noted_commit, noted_finish


def main() -> None:
    watch(int(sys.argv[1]))
    del sys.argv[:2]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
