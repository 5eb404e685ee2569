"""`pycoll check` finds the first difference of a mesh; `pycoll scale` times it and fits laws."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import invoke
from mesh_cases import in_one_world, run_script
from tiny_gpt import GPT, PLAN, batches
from torch import nn

from pycoll import UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.tools import scaling_laws as laws
from pycoll.parallel.tools.activations import Activations, first_difference
from pycoll.parallel.tools.scaling_report import Times, report
from pycoll.parallel.tools.step_parts import StepParts, parts

ROOT = Path(__file__).resolve().parents[2]

# "broken" adds noise that differs between ranks; with "layer", one layer is wrong on a mesh.
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


class Forked:
    """In place of the command's launcher: ranks that need not import torch."""

    def __init__(self, command: list[str], world, extra: dict[str, str], *_) -> None:
        self.script, self.args = Path(command[1]), command[2:]
        self.num_ranks, self.extra = world.size, extra
        world.close()

    def run(self) -> int:
        run_script(self.script, self.num_ranks, *self.args, **self.extra)
        return 0


@pytest.fixture
def script(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr("pycoll.launch.script.Launch", Forked)
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2,tp=2,pp=2"])
def test_script_that_is_right_is_equal(mesh, script):
    said = invoke("check", "--mesh", mesh, script)
    assert f"3 steps on {mesh} equal those of one process: largest difference" in said


def test_script_that_is_wrong_is_told_what_differs_first(script):
    said = invoke("check", "--mesh", "dp=2", script, "broken", status=1)
    assert "the first tensor that differs: loss of step-0, by" in said


@pytest.mark.parametrize(
    ("mesh", "rank"),
    [
        ("pp=2", "rank 1: pp 1"),
        ("dp=2,cp=2,tp=2", "rank 0: dp 0, cp 0, tp 0"),
        ("ep=2,cp=2", "rank 0: ep 0, cp 0"),
    ],
)
def test_layer_that_is_wrong_is_named(mesh, rank, script):
    said = invoke("check", "--mesh", mesh, script, "layer", status=1)
    first = f"output of blocks.1.qkv of step-0, on {rank}, by 1e-06"
    assert f"the first tensor that differs: {first}" in said


def test_script_that_steps_too_little_is_an_error(script):
    said = invoke("check", "--mesh", "dp=1", script, "short", status=2)
    assert "took fewer than 3 steps of pc.optimizer on one process" in said


def test_scale_times_a_script_on_one_rank_and_two(script):
    said = invoke("scale", "--json", "--steps", "4", script)
    found = json.loads(said[said.index("{") :])
    assert found["kind"] == "strong" and [row["ranks"] for row in found["rows"]] == [1, 2]
    assert all(row["seconds"] > 0 and row["tokens"] == 60 for row in found["rows"])


SLEEPING = """
import sys
import time
import torch
from pycoll import parallel as pc

class Sleeper(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.005 * len(x) + 0.02 * mesh.world.rank)
        return super().forward(x)

mesh = pc.mesh()
model = pc.parallelize(Sleeper(4, 4), mesh)
optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
batch = int(sys.argv[1])
for x, y in pc.shard([(torch.ones(batch, 4), torch.ones(batch, 4))] * 9, mesh):
    model.step(x, y, loss=torch.nn.functional.mse_loss)
    optimizer.step()
"""


def test_scale_divides_steps_into_computing_and_waiting_and_runs_one_rank_alone(script, tmp_path):
    """A sample takes 5 ms, and rank 1 20 ms more: rank 0 waits for it. Three worlds: 2 s."""
    Path(script).write_text(SLEEPING)
    picture = tmp_path / "scale.svg"
    args = ("--weak", "--json", "--steps", "3", "--plot", str(picture), script, "{4n}")
    said = invoke("scale", *args, "--updates", "100", "--flops", "1e6")
    found = json.loads(said[said.index("{\n") : said.rindex("}") + 1])
    one, two = found["rows"]
    assert (found["kind"], two["tokens"]) == ("weak", 2 * one["tokens"])
    # 10 ms is the mean wait of both ranks; less if the system lets rank 0 sleep longer.
    assert two["alone_s"] >= 0.04 and two["compute_s"] >= 0.03 and two["waiting_s"] >= 0.005
    assert two["speed_up"] == two["alone_s"] / two["seconds"]
    for row in (one, two):
        all_s = row["compute_s"] + row["communication_s"] + row["waiting_s"]
        assert all_s == pytest.approx(row["seconds"], rel=0.02)
        assert row["all_s"] == 100 * row["seconds"]
        assert row["petaflop_s_days"] == pytest.approx(row["ranks"] * 1e8 / 8.64e19)
    text = picture.read_text()
    assert all(label in text for label in ("Gustafson", "computing", "communication", "waiting"))
    assert "--batch {8n}" in invoke("scale", "--weak", script, "4", status=2)


def test_scale_fits_known_times_of_bert_large():
    """30 days on one GPU, 47 minutes on 1,472 (NVIDIA, 2019)."""
    known = ("--times", "1:2592000,1472:2820")
    said = invoke("scale", *known, "--price", "0.001", "--deadline", "3600")
    assert all(number in said for number in ("919.15", "62.4%", "0.00041", "1472 ranks, 4151 for"))
    _, row = json.loads(invoke("scale", *known, "--json"))["rows"]
    assert row["serial"] == pytest.approx(4.1e-4, rel=0.01)
    said = invoke("scale", *known, "--price", "0.001", "--deadline", "60", status=2)
    assert "no number of ranks keeps 60 s; the fastest takes 2820 s" in said
    assert "either a script or --times" in invoke("scale", status=2)
    assert "expected such as 1:43200" in invoke("scale", "--times", "1:x", status=2)


@pytest.mark.slow
def test_check_starts_processes_and_ends_their_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "check", "--mesh", "tp=2", str(tmp_path / "train.py")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'parallel'}"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "3 steps on tp=2 equal those of one process: largest difference" in done.stdout
    assert "the end" not in done.stdout


class Wrong(nn.Linear):
    """Off by a little."""

    def forward(self, x):
        return super().forward(x) + 1e-6


def record(comm, sizes: dict, path, wrong: bool, microbatches=2, **options):
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh):
        model = GPT(depth=2, tie=True).double()
        if wrong:
            model.blocks[1].up.__class__ = Wrong
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    activations = Activations(pc.trainer_of(model))
    model.step(
        *next(pc.shard(batches(1, 6), mesh)), loss=pc.cross_entropy, microbatches=microbatches
    )
    path = path.with_suffix(f".{comm.rank}")
    activations.write(path)
    return path


def test_first_wrong_output_is_found_on_a_mesh_and_none_where_all_are_right(tmp_path):
    layouts = [
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"pp": 2}, {"recompute": True}),
        ({"pp": 2, "tp": 2}, {}),
        ({"dp": 2}, {"zero": 3}),
    ]

    def work(comm, i: int, wrong: bool):
        sizes, options = layouts[i]
        return record(comm, sizes, tmp_path / f"{i}-{wrong}", wrong, **options)

    (one,) = run_ranks(record, 1, {}, tmp_path / "one", False, 1)
    cases = [
        (math.prod(layouts[i][0].values()), i, wrong)
        for i in range(len(layouts))
        for wrong in (False, True)
    ]
    for (_, i, wrong), paths in zip(cases, in_one_world(work, cases), strict=True):
        if wrong:
            layer, rank, difference = first_difference(one, paths, 1e-10)
            assert layer == "blocks.1.up" and rank.startswith("rank "), layouts[i]
            assert difference == pytest.approx(1e-6, rel=1e-3), layouts[i]
            continue
        assert first_difference(one, paths, 1e-10) is None, layouts[i]
        names = {call[0] for path in paths for call, _ in torch.load(path)["found"]}
        expected = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "drop", "qkv")}
        assert expected <= names, layouts[i]


@pytest.mark.pure
def test_fits_find_what_the_laws_were_given():
    for parallel in (0.0, 0.5, 0.8, 1.0):
        times = {n: 3.0 / laws.amdahl(parallel, n) for n in (1, 2, 4, 8)}
        fit = laws.fit_amdahl(times)
        assert fit.parallel == pytest.approx(parallel, abs=1e-9)
        assert fit.speed_up == pytest.approx(fit.law)
        alone = {n: 3.0 * laws.gustafson(parallel, n) for n in times}
        fit = laws.fit_gustafson(dict.fromkeys(times, 3.0), alone)
        assert fit.parallel == pytest.approx(parallel, abs=1e-9)
        assert fit.efficiency == dict.fromkeys(times, 1.0)


def steps(found: dict[int, tuple[float, int]], alone: dict[int, float] | None = None) -> Times:
    return Times({n: StepParts(s, tokens, s, 0.0, 0.0) for n, (s, tokens) in found.items()}, alone)


@pytest.mark.pure
def test_parts_of_a_step_add_up_and_the_last_rank_does_not_wait():
    step = parts([(1.0, 0.5, 0.0), (1.0, 0.1, 0.0), (1.0, 0.1, 0.2)], 60)
    assert step.communication_s == 0.1
    assert step.waiting_s == pytest.approx((0.4 + 0.2) / 3)
    assert step.compute_s == pytest.approx((0.5 + 0.9 + 0.7) / 3)
    assert step.compute_s + step.communication_s + step.waiting_s == pytest.approx(step.seconds)


@pytest.mark.pure
def test_weak_scaling_is_measured_against_one_rank_with_the_whole_batch():
    times = {1: (1.0, 64), 2: (1.25, 128)}
    weak = report(steps(times, {1: 1.0, 2: 1.5}), strong=False)
    assert weak["rows"][1]["speed_up"] == pytest.approx(1.2)
    assert weak["parallel"] == pytest.approx(0.2)
    with pytest.raises(UsageError, match="expected a constant number"):
        report(steps(times), strong=True)
    with pytest.raises(UsageError, match="expected one proportional to n"):
        report(steps({1: (1.0, 64), 2: (0.6, 64)}), strong=False)


@pytest.mark.pure
def test_report_of_scaling_knows_strong_from_weak():
    strong = report(steps({1: (1.0, 64), 2: (0.6, 64), 4: (0.4, 64)}))
    assert strong["kind"] == "strong" and strong["parallel"] == pytest.approx(0.8)
    assert [row["efficiency"] for row in strong["rows"]] == pytest.approx([1, 1 / 1.2, 1 / 1.6])
    weak = report(steps({1: (1.0, 64), 2: (1.25, 128)}))
    assert weak["kind"] == "weak" and weak["rows"][1]["speed_up"] == pytest.approx(1.6)
    assert weak["rows"][1]["efficiency"] == pytest.approx(0.8)
    with pytest.raises(UsageError, match="expected a constant number"):
        report(steps({1: (1.0, 64), 2: (1.0, 100)}))


@pytest.mark.pure
def test_times_without_one_rank_are_an_error():
    with pytest.raises(UsageError, match="expected times of one rank"):
        laws.fit_amdahl({2: 1.0, 4: 0.5})


SERIAL, SHARED = 0.2, 0.8  # a fifth of the time is not shared out


def sleeping_jobs(comm, unit_s: float) -> dict[tuple[int, int], float]:
    """Fastest seconds of jobs by number of ranks and size; sleeps need no cores of their own."""
    found: dict[tuple[int, int], float] = {}
    with contextlib.ExitStack() as stack:
        parts = {n: comm.split(0 if comm.rank < n else -1) for n in (1, 2, 4)}
        for part in parts.values():
            stack.enter_context(part or contextlib.nullcontext())
        for _ in range(3):
            for n, size in [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 4)]:
                comm.barrier()
                if (part := parts[n]) is None:
                    continue
                part.barrier()
                start = time.monotonic()
                if part.rank == 0:
                    time.sleep(SERIAL * unit_s)
                part.barrier()
                time.sleep(SHARED * size / n * unit_s)
                part.barrier()
                took = time.monotonic() - start
                found[n, size] = min(took, found.get((n, size), took))
    return found


def error_of_the_laws(unit_s: float) -> float:
    """Largest relative error of the laws for sleeping jobs."""
    times = run_ranks(sleeping_jobs, 4, unit_s, timeout_s=60)[0]
    strong = laws.fit_amdahl({n: times[n, 1] for n in (1, 2, 4)})
    weak = laws.fit_gustafson(
        {n: times[n, n] for n in (1, 2, 4)}, {n: times[1, n] for n in (1, 2, 4)}
    )
    share = SHARED / (SERIAL + SHARED)
    pairs = [(strong.speed_up[n], laws.amdahl(share, n)) for n in (2, 4)]
    pairs += [(weak.speed_up[n], laws.gustafson(share, n)) for n in (2, 4)]
    pairs += [(strong.parallel, share), (weak.parallel, share)]
    return max(abs(found / expected - 1) for found, expected in pairs)


@pytest.mark.slow
def test_sleeping_jobs_follow_the_laws():
    """Seconds of sleep; another process delays barriers, so jobs that are off sleep longer."""
    errors: list[float] = []
    for unit_s in (0.3, 1.0, 3.0):
        errors.append(error_of_the_laws(unit_s))
        if errors[-1] <= 0.05:
            return
    pytest.fail(f"off by {errors}, with longer and longer sleeps")
