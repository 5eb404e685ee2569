"""`pycoll chaos`: faults by seed, and what they cost an elastic training."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from command_line import start as start_command
from torch import nn
from worlds import Comm, end, start

import pycoll
from pycoll import parallel as pc
from pycoll.chaos.faults import FAULTS, inject
from pycoll.chaos.notes import Note, summary_of
from pycoll.chaos.run import drawn

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import torch
from torch import nn
from pycoll import parallel as pc

class Points:
    def __len__(self):
        return 48
    def __getitem__(self, i):
        random = torch.Generator().manual_seed(i)
        return torch.randn(5, generator=random, dtype=torch.float64), torch.tensor(i % 3)

def build(mesh):
    torch.manual_seed(0)
    model = pc.parallelize(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)).double(), mesh, zero=1)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return {"model": model, "optimizer": optimizer, "loader": pc.loader(Points(), 12, mesh)}

def train(job):
    while job.commits < 12:
        for x, y in job.loader:
            job.model.step(x, y, loss=nn.functional.cross_entropy)
            job.optimizer.step()
            job.commit()

pc.elastic(build, train, virtual_replicas=2)
"""


@pytest.mark.slow  # four processes import torch, one after the other
def test_command_says_what_faults_cost(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    options = ["-n", "2", "--seed", "3", "--faults", "kill", "--count", "1", "--bits"]
    command = start_command("chaos", *options, str(path))
    out, err = command.communicate(timeout=150)
    assert command.returncode == 0, (out, err)
    assert "status        0, after 12 of 12 commits" in out
    assert "bits equal" in out and "goodput" in out
    assert "kill rank" in err


def test_command_refuses_unknown_faults():
    _, err = run("chaos", "--faults", "kill,flood", __file__, status=2)
    assert "'flood' is none of kill" in err
    _, err = run("chaos", "--faults", "kill,partition", __file__, status=2)
    assert "partition needs several hosts" in " ".join(err.split())


@pytest.mark.pure
def test_faults_of_a_seed_are_the_same_again():
    first = drawn(7, list(FAULTS), 5, 40, 0.3)
    assert first == drawn(7, list(FAULTS), 5, 40, 0.3) != drawn(8, list(FAULTS), 5, 40, 0.3)
    commits = [fault.commit for fault in first]
    assert commits == sorted(set(commits)) and set(commits) <= set(range(1, 39))
    assert len(drawn(1, ["kill"], 9, 5, 0.3)) == 3  # no more than there are commits


@pytest.mark.pure
def test_summary_counts_repeated_steps_and_stalls():
    def notes(pid: int, *entries: tuple[str, int, float]) -> list[Note]:
        return [Note(what, commits, at_s, pid, 0, 1) for what, commits, at_s in entries]

    steps = [("built", 0, 0.0), ("committed", 1, 1.0), ("committed", 2, 2.0), ("committed", 3, 3.0)]
    survivor = [*steps, ("built", 2, 3.5), ("committed", 3, 6.0), ("committed", 4, 7.0)]
    found = summary_of(notes(1, *survivor) + notes(2, *steps))
    assert (found.commits, found.seconds, found.lost) == (4, 6.0, 1)
    assert found.stalls_s == [2.0] and found.stall_s(0.5) == found.stall_s(0.99) == 2.0
    ends = [Note("finished", 4, 8.0, pid, 0, 1, text) for pid, text in ((1, "a"), (2, "a"))]
    assert summary_of(notes(1, *steps) + ends).digest == "a"
    assert (
        summary_of(notes(1, *steps) + [*ends, Note("finished", 4, 8.0, 3, 0, 1, "b")]).digest == ""
    )
    assert summary_of([]).commits == 0


def test_full_disk_fails_a_save_and_leaves_the_checkpoint_before(tmp_path: Path):
    def work(comm: Comm) -> tuple[str, Any, bool]:
        mesh = pc.mesh(comm=comm)
        model = pc.parallelize(nn.Linear(100, 100), mesh)
        optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        pc.save(tmp_path, model, optimizer, extra={"step": 1})
        before = model.weight.detach().clone()
        full = threading.Thread(target=inject, args=("disk", os.getpid(), 1.0))
        full.start()
        time.sleep(0.1)
        with torch.no_grad():
            model.weight += 1
        with pytest.raises(pycoll.SystemError) as raised:
            pc.save(tmp_path, model, optimizer, extra={"step": 2})
        full.join()
        loaded = pc.load(tmp_path, model, optimizer)
        return str(raised.value), loaded, torch.equal(model.weight, before)

    for text, loaded, is_equal in end(start(work, 2)):
        assert "ranks could not write to" in text
        assert loaded == {"step": 1} and is_equal
