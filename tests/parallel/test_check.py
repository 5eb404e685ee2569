"""`pycoll check`: says that a script computes the same on a mesh, or what differs first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

ROOT = Path(__file__).resolve().parents[2]

# The second model drops without telling where: each rank draws masks of its own. With "layer", one
# layer is wrong on a mesh.
SCRIPT = """
import os
import sys
import torch
from tiny_gpt import GPT, PLAN, batches
from pycoll import parallel as pc

class Broken(GPT):
    def forward(self, tokens):
        x = super().forward(tokens)
        return x * (1 + 1e-6 * torch.rand(1)) if len(tokens) < 8 else x

class Wrong(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1e-6 * (os.environ["PYCOLL_MESH"] != "dp=1")

def main():
    mesh = pc.mesh(tp=2)
    with pc.keyed_init(mesh):
        model = (Broken if "broken" in sys.argv else GPT)(depth=2, fused=True, experts=4)
    if "layer" in sys.argv:
        model.blocks[1].qkv.__class__ = Wrong
    model = pc.parallelize(model, mesh, tp={} if "broken" in sys.argv else PLAN, pp="blocks")
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0)
    for x, y in pc.shard(batches(2 if "short" in sys.argv else 9, 8), mesh):
        model.step(x, y, loss=pc.cross_entropy)
        optimizer.step()
    print("the end")

main()
"""


def check(tmp_path: Path, mesh: str, *args: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = f"{ROOT}:{ROOT / 'tests' / 'parallel'}"
    return subprocess.run(
        [sys.executable, "-m", "pycoll", "check", "--mesh", mesh, str(script), *args],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_script_that_is_right_is_said_to_be_equal(tmp_path):
    done = check(tmp_path, "tp=2")
    assert done.returncode == 0, done.stderr
    assert "3 steps on tp=2 equal those of one process: largest difference" in done.stdout
    assert "the end" not in done.stdout


@pytest.mark.slow
def test_script_on_all_axes_is_said_to_be_equal(tmp_path):
    done = check(tmp_path, "cp=2,tp=2,pp=2")
    assert done.returncode == 0, done.stderr
    assert "equal those of one process" in done.stdout


@pytest.mark.slow
def test_script_that_is_wrong_is_told_what_differs_first(tmp_path):
    done = check(tmp_path, "dp=2", "broken")
    assert done.returncode == 1, done.stderr
    assert "the first tensor that differs: loss of step-0, by" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "rank"),
    [
        ("tp=2", "rank 0: tp 0"),
        ("pp=2", "rank 1: pp 1"),
        ("dp=2,cp=2,tp=2", "rank 0: dp 0, cp 0, tp 0"),
        ("ep=2,cp=2", "rank 0: ep 0, cp 0"),
    ],
)
def test_layer_that_is_wrong_is_named(mesh, rank, tmp_path):
    done = check(tmp_path, mesh, "layer")
    assert done.returncode == 1, done.stderr
    first = f"output of blocks.1.qkv of step-0, on {rank}, by 1e-06"
    assert f"the first tensor that differs: {first}" in done.stdout


@pytest.mark.slow
def test_script_that_steps_too_little_is_an_error(tmp_path):
    done = check(tmp_path, "dp=1", "short")
    assert done.returncode == 2
    assert "took fewer than 3 steps of pc.optimizer on one process" in done.stderr


@pytest.mark.slow
def test_scale_times_a_script_on_one_rank_and_two(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "scale", "--json", "--steps", "4", str(script)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'parallel'}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "strong" and [row["ranks"] for row in found["rows"]] == [1, 2]
    assert all(row["seconds"] > 0 and row["tokens"] == 60 for row in found["rows"])
