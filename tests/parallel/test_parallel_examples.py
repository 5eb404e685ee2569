"""The trainers' examples reach the targets that they state, with the same result on every mesh."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_cases import run_script

from pycoll.parallel.core.mesh import parse_sizes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(mesh: str, example: str, *args: str) -> str:
    n = math.prod(parse_sizes(mesh).values())
    return "".join(run_script(EXAMPLES / example, n, *args, PYCOLL_MESH=mesh))


def test_digits_are_read_on_uneven_ranks():
    pytest.importorskip("sklearn")
    assert "3 ranks: accuracy 0.9" in run("dp=3", "digits.py")


@pytest.mark.soak
def test_lamb_keeps_the_accuracy_of_small_batches():
    """Eight runs of 90 or 2,700 steps: 30 s."""
    pytest.importorskip("sklearn")
    text = run("dp=1", "large_batch.py")
    lines = re.findall(r"(SGD|LAMB) +batch +(\d+): accuracy +([\d.]+)", text)
    of = {(name, int(batch)): float(accuracy) for name, batch, accuracy in lines}
    lost = {name: of[name, 16] - of[name, 512] for name in ("SGD", "LAMB")}
    assert lost["LAMB"] <= 1.5 and lost["SGD"] >= 3, of


def loss_of(text: str) -> tuple[float, float]:
    loss, target = re.search(r"loss ([\d.]+), bigram entropy ([\d.]+)", text).groups()
    return float(loss), float(target)


@pytest.mark.slow
def test_gpt_says_the_same_on_every_mesh_and_beats_the_bigrams():
    one, _ = loss_of(run("dp=1", "gpt.py", "--steps", "5"))
    for mesh in ("dp=4", "tp=2", "dp=2,cp=2", "tp=2,pp=2"):
        other, _ = loss_of(run(mesh, "gpt.py", "--steps", "5"))
        assert one == pytest.approx(other, abs=2e-4), mesh
    loss, target = loss_of(run("dp=2", "gpt.py"))
    assert loss < target
    assert len((EXAMPLES / "gpt.py").read_text().splitlines()) < 120


@pytest.mark.slow
def test_gpt_runs_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "--no-prefix", "--mesh", "dp=2",
         str(EXAMPLES / "gpt.py"), "--steps", "4"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert loss_of(done.stdout)
