"""Operations of a model, late ranks, writers, and metrics of one's own in an evaluation."""

from __future__ import annotations

import io
import json
import time
from collections import Counter

import pytest
import torch
from mesh_cases import in_one_world
from tiny_gpt import GPT, PLAN, batches
from torch import nn

from pycoll import UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.core.lateness import Late, latest
from pycoll.parallel.core.metrics import line


@pytest.mark.pure
def test_flops_of_a_gpt_are_those_of_the_formula():
    """72 B s l h^2 (1 + s/6h + V/12lh): Narayanan et al., arXiv:2104.04473, without recompute."""
    b, s, layers, h, v = 2, 64, 3, 96, 512
    with torch.device("meta"):
        model = GPT(vocab=v, dim=h, depth=layers, heads=8, context=s, fused=True)
    found = pc.flops(model, torch.zeros(b, s, dtype=torch.int64))
    formula = 72 * b * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert found.total == formula and found.backward == 2 * found.forward
    assert found.per_sample == formula / b
    assert found.by_layer["head"] == (2 * b * s * h * v, 4 * b * s * h * v)
    assert found.by_layer["blocks.0"] == found.by_layer["blocks.2"]
    within = [found.by_layer[f"blocks.1.{name}"][0] for name in ("qkv", "out", "up", "down")]
    attention = 4 * b * s * s * h
    assert found.by_layer["blocks.1"][0] == sum(within) + attention
    assert sum(map(sum, found.by_operator.values())) == found.total
    assert "blocks.1.qkv" not in found.table() and "blocks.1.qkv" in found.table(3)


@pytest.mark.pure
def test_flops_of_convolutions_and_frozen_layers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 5))
    found = pc.flops(model, torch.zeros(4, 3, 8, 8))
    conv, linear = 2 * 4 * 8 * 36 * 27, 2 * 4 * 288 * 5
    assert found.by_layer == {"0": (conv, conv), "2": (linear, 2 * linear)}  # x needs no gradient
    model[2].requires_grad_(False)
    assert pc.flops(model, torch.zeros(4, 3, 8, 8)).by_layer["2"] == (linear, linear)


@pytest.mark.pure
def test_the_late_rank_is_found_with_its_part():
    even = [0.1, 1.0, 2.0, 0.0]
    assert latest([even]) is None
    late = latest([even, even, [0.1, 1.0, 2.5, 0.0], even])
    assert late == Late(2, "backward", pytest.approx(0.5))
    assert latest([[0.4, 1.0, 2.0, 0.0], even]).part == "between steps"


def sleeper(comm, part: str, plain: bool = False, steps: int = 4):
    """Rank 2 sleeps in one part of each step; the others compute nothing of note."""
    mesh = pc.mesh(dp=-1, comm=comm)
    model = pc.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh)
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    nap = lambda *_: time.sleep(0.1 * (comm.rank == 2))  # noqa: E731
    if part == "forward":
        model[0].register_forward_hook(nap)
    if part == "backward":
        model[1].register_full_backward_hook(nap)
    found, text = [], io.StringIO()
    for _ in range(steps):
        if part == "between steps":
            nap()
        x, y = torch.ones(2, 4), torch.ones(2, 2)
        if plain:
            with model.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
            nn.functional.mse_loss(model(x), y).backward()
        else:
            model.step(x, y, loss=nn.functional.mse_loss)
        optimizer.step()
        out = optimizer.last
        assert (out.plain, out.samples) == (plain, 4 * comm.size if plain else 2 * comm.size)
        found.append((out.late.rank, out.late.part))
        numbers = pc.log(out, file=text)
        assert numbers["late_rank"] == out.late.rank and numbers["late_s"] == out.late.seconds
    mesh.close()
    return found, text.getvalue()


def test_log_names_the_late_rank_and_where_it_is_late():
    """Sleeps of 0.1 s in four steps of six trainings, by `model.step` and by `loss.backward()`."""
    cases = [
        (3, part, plain)
        for part in ("between steps", "forward", "backward")
        for plain in (False, True)
    ]
    for (_, part, plain), outcomes in zip(cases, in_one_world(sleeper, cases), strict=True):
        votes = [Counter(found[1:]).most_common(1)[0] for found, _ in outcomes]
        assert votes[0] == votes[1] == votes[2], part
        assert votes[0][0] == (2, part) and votes[0][1] >= 2
        assert "rank 2 is late by 0." in outcomes[0][1] and f"({part})" in outcomes[0][1]
        assert ("samples/s" if plain else "tokens/s") in outcomes[0][1]


@pytest.mark.timing
@pytest.mark.soak
def test_a_rank_that_is_late_within_backward_is_named_in_each_step():
    for plain in (False, True):
        for found, _ in run_ranks(sleeper, 3, "backward", plain, 21):
            assert found[1:] == [(2, "backward")] * 20


def measured(comm, folder):
    mesh = pc.mesh(dp=-1, comm=comm)
    plain = GPT(fused=True)
    x, y = next(pc.shard(batches(1, 6), mesh))
    operations = pc.flops(plain, x).per_sample
    model = pc.parallelize(plain, mesh)
    with pytest.raises(UsageError, match="flops: this is one rank's part"):
        pc.flops(model, x)
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    writers = [pc.JsonLines(folder / f"{comm.rank}.jsonl")]
    for _ in range(2):
        out = model.step(x, y, loss=pc.cross_entropy)
        optimizer.step()
        numbers = pc.log(
            out, file=io.StringIO(), writers=writers, flops_per_sample=operations, peak=1e9
        )
    assert numbers["samples"] == 6 and numbers["flops"] == pytest.approx(6 * operations)
    speed = numbers["flops"] / out.seconds
    assert numbers["mfu"] == pytest.approx(speed / 1e9 / comm.size)
    assert 2**20 < numbers["memory_peak"] < 2**40
    assert f"MFU {numbers['mfu']:.1%}" in line(numbers)
    return numbers


def test_numbers_are_written_as_lines_of_json(tmp_path):
    numbers = run_ranks(measured, 2, tmp_path)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]
    lines = [json.loads(text) for text in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert [one["step"] for one in lines] == [0, 1] and lines[1] == numbers
    writer = pc.JsonLines(tmp_path / "new" / "x.jsonl")
    writer.write({"step": 0, "grad_norm": float("nan")})
    assert json.loads((tmp_path / "new" / "x.jsonl").read_text()) == {"step": 0, "grad_norm": None}


def test_tensorboard_writes_scalars_or_says_what_is_missing(tmp_path):
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="pip install tensorboard, or take pc.JsonLines"):
            pc.TensorBoard(tmp_path)
        return
    writer = pc.TensorBoard(tmp_path)
    writer.write({"step": 3, "loss": 1.5})
    assert list(tmp_path.glob("events*"))


def right(logits, target):
    counted = target != -100
    return ((logits.argmax(-1) == target) & counted).sum(), counted.sum()


def evaluated(comm, sizes, **options):
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(fused=True, drop=0.0)
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    x, y = next(pc.shard(batches(1, 8), mesh))
    metrics = {"right": right, "largest": lambda logits, y: logits.amax(-1).mean()}
    found = model.evaluate(x, y, loss=pc.cross_entropy, metrics=metrics, microbatches=2)
    assert found["loss"] == pytest.approx(model.evaluate(x, y, loss=pc.cross_entropy), abs=1e-12)
    if not sizes:
        logits = model(x)
        assert found["right"] == float(right(logits, y)[0]) / int((y != -100).sum())
        halves = [logits[:4], logits[4:]]
        counts = [int((of != -100).sum()) for of in (y[:4], y[4:])]
        largest = sum(
            n * float(part.amax(-1).mean()) for n, part in zip(counts, halves, strict=True)
        )
        assert found["largest"] == pytest.approx(largest / sum(counts), abs=1e-12)
    mesh.close()
    return found


def test_metrics_of_an_evaluation_are_those_of_one_process():
    """The mean of `largest` counts targets other than -100, as a loss does."""
    expected = run_ranks(evaluated, 1, {})[0]
    assert 0 < expected["right"] < 0.3
    cases = [(2, {"tp": 2}), (2, {"cp": 2}), (4, {"dp": 2, "pp": 2})]
    for case, of_ranks in zip(cases, in_one_world(evaluated, cases), strict=True):
        for found in of_ranks:
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-12), case
            assert found["right"] == pytest.approx(expected["right"], abs=1e-12), case
