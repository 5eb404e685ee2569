"""The trainers' examples reach the targets that they state, and say the same on every mesh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

ROOT = Path(__file__).resolve().parents[2]


def run(mesh: str, example: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "--no-prefix", "--mesh", mesh,
         str(ROOT / "examples" / example), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_are_read_on_uneven_ranks():
    pytest.importorskip("sklearn")
    assert "3 ranks: accuracy 0.9" in run("dp=3", "digits.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", ["dp=1", "dp=4", "tp=2", "pp=4", "dp=2,cp=2", "dp=2,tp=2,pp=2"])
def test_gpt_beats_the_bigrams_on_every_mesh(mesh):
    said = run(mesh, "gpt.py")
    loss, target = re.search(r"loss ([\d.]+), bigram entropy ([\d.]+)", said).groups()
    assert float(loss) < float(target)


@pytest.mark.slow
def test_gpt_says_the_same_on_two_meshes():
    said = [run(mesh, "gpt.py", "--steps", "10") for mesh in ("dp=1", "dp=2,tp=2")]
    one, other = (float(re.search(r"loss ([\d.]+)", text)[1]) for text in said)
    assert one == pytest.approx(other, abs=2e-4)
    assert len((ROOT / "examples" / "gpt.py").read_text().splitlines()) < 120
