"""Damaged checkpoints and killed writers: the right values, or the checkpoint before.

Each case saves two checkpoints of two ranks, loads ten damaged copies of the newer one, and then
kills a rank while it saves a third one. What is left must load, and the next save must remove all
that does not belong to a checkpoint.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  torch's optimizers import it when they are first made
from damaged_checkpoints import NEWER, load_damaged, loaded, prepare, save_two, step
from isolated import run_isolated

import pycoll
from injections import Outcome
from pycoll import parallel as pc

CASES = 60
FEW = (1, 2)
DAMAGED = 10  # of a case
DEADLINE_S = 120.0
SAVE_S = 0.02  # about as long as a save takes


def save_next(comm: pycoll.Communicator, folder: Path, victim: int, after_s: float) -> None:
    """Goes on from the newest checkpoint and saves the next; `victim` is killed meanwhile."""

    def kill() -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    model, optimizer = prepare(comm)
    pc.load(folder, model, optimizer)
    step(comm, model, optimizer)
    comm.barrier()
    if comm.rank == victim:
        threading.Thread(target=kill, daemon=True).start()
    pc.save(folder, model, optimizer, extra={"place": 3})
    if comm.rank == victim:
        time.sleep(2 * SAVE_S)


def load(folder: Path) -> list[Any]:
    [(values, texts)] = pycoll.run_ranks(loaded, 1, folder)
    assert not texts, texts
    return values


def check_kill(folder: Path, rng: random.Random) -> str:
    newer = load(folder / NEWER)
    whole = folder.with_name("whole")
    shutil.copytree(folder, whole)
    pycoll.run_ranks(save_next, 2, whole, -1, 0.0)
    third = load(whole)
    outcomes = pycoll.run_ranks(
        save_next, 2, folder, rng.randrange(2), rng.uniform(0, 2 * SAVE_S), return_errors=True
    )
    # A rank that had saved before the other one was killed has returned.
    if not all(outcome is None or isinstance(outcome, pycoll.Error) for outcome in outcomes):
        return f"the ranks of a killed save ended with {outcomes!r}"
    if load(folder) not in (newer, third):
        return "other values are loaded after a kill"
    pycoll.run_ranks(save_next, 2, folder, -1, 0.0)
    left = sorted(path.name for path in folder.iterdir())
    if len(left) != 2 or not all((folder / name / "index.json").exists() for name in left):
        return f"left behind after a kill and another save: {left}"
    return ""


def run_here(seed: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "checkpoints")
        pycoll.run_ranks(save_two, 2, folder)
        [(_, wrong)] = pycoll.run_ranks(load_damaged, 1, folder, DAMAGED, seed * 1000)
        if wrong:
            return f"{len(wrong)} of {DAMAGED}: {wrong[0]}"
        return check_kill(folder, random.Random(seed))


def run_case(seed: int) -> Outcome:
    complaint, crash = run_isolated(functools.partial(run_here, seed), DEADLINE_S)
    return Outcome(crash[-500:] or complaint)
