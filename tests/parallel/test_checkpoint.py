"""Checkpoints: from any mesh to any mesh, and whole whatever happens while one is written."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tiny_gpt import GPT, batches  # noqa: E402

from pycoll import PeerDiedError, SystemError, UsageError, run_ranks  # noqa: E402
from pycoll import parallel as pc  # noqa: E402
from pycoll.parallel.trainer.checkpoint import checkpoints, newest  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

HALF, STEPS = 3, 6
LAYOUTS = {
    "one": (1, {}, {}),
    "dp2_zero1": (2, {}, {"zero": 1}),
    "tp2": (2, {"tp": 2}, {}),
    "dp3_zero3": (3, {}, {"zero": 3}),
    "dp2_tp2_zero2": (4, {"tp": 2}, {"zero": 2, "sequence_parallel": True}),
    "pp2_tp2_zero1": (4, {"pp": 2, "tp": 2}, {"zero": 1}),
    "ep2_cp2_zero2": (4, {"ep": 2, "cp": 2}, {"zero": 2}),
}


# tp leaves what is within experts whole, where it shares sequences out.
PLAN = {
    "*.qkv": "qkv", "blocks.0.up": "col", "*.out|blocks.0.down": "row", "token|head": "vocab",
}  # fmt: skip


def prepare(comm, sizes: dict, options: dict):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(depth=2, hidden=37, tie=True, fused=True, experts=3)
        model.register_buffer("seen", torch.zeros(2))
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    return mesh, model, pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), clip=0.5)


def steps(mesh, model, optimizer, first: int, last: int) -> list[float]:
    losses = []
    for x, y in itertools.islice(pc.shard(batches(last, 6), mesh), first, last):
        losses.append(model.step(x, y, loss=pc.cross_entropy, microbatches=2).loss)
        optimizer.step()
        model.seen += 1
    return losses


def first_half(comm, sizes: dict, options: dict, folder: Path) -> None:
    mesh, model, optimizer = prepare(comm, sizes, options)
    steps(mesh, model, optimizer, 0, HALF)
    pc.save(folder, model, optimizer, extra={"place": HALF})


def second_half(comm, sizes: dict, options: dict, folder: Path):
    mesh, model, optimizer = prepare(comm, sizes, options)
    with torch.no_grad():
        for piece in pc.trainer_of(model).reducer.pieces.values():
            piece.value.fill_(7)
    place = pc.load(folder, model, optimizer)["place"]
    losses = steps(mesh, model, optimizer, place, STEPS)
    return losses, pc.whole_weights(model), model.seen.tolist()


@functools.cache
def uninterrupted():
    def work(comm):
        mesh, model, optimizer = prepare(comm, {}, {})
        return steps(mesh, model, optimizer, 0, STEPS)[HALF:], pc.whole_weights(model)

    return run_ranks(work, 1)[0]


def assert_goes_on(folder: Path, to: str) -> None:
    losses, weights = uninterrupted()
    n, sizes, options = LAYOUTS[to]
    for got in run_ranks(second_half, n, sizes, options, folder):
        assert all(abs(a - b) <= 1e-10 for a, b in zip(losses, got[0], strict=True))
        for name, weight in weights.items():
            assert (weight - got[1][name]).abs().max() <= 1e-10, name
        assert got[2] == [STEPS, STEPS]


@pytest.mark.parametrize(
    ("before", "after"), [("dp2_zero1", "tp2"), ("dp2_tp2_zero2", "pp2_tp2_zero1")]
)
def test_training_goes_on_from_another_mesh(before, after, tmp_path):
    n, sizes, options = LAYOUTS[before]
    run_ranks(first_half, n, sizes, options, tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{HALF:09d}"]
    assert len(list(newest(tmp_path).glob("rank-*.safetensors"))) == n
    assert_goes_on(tmp_path, after)


@pytest.mark.slow
@pytest.mark.parametrize("before", LAYOUTS)
def test_training_goes_on_from_every_mesh_to_every_mesh(before, tmp_path):
    n, sizes, options = LAYOUTS[before]
    run_ranks(first_half, n, sizes, options, tmp_path)
    for after in LAYOUTS:
        assert_goes_on(tmp_path, after)


def test_only_the_newest_are_kept_and_nothing_else_is_left(tmp_path):
    def work(comm):
        mesh, model, optimizer = prepare(comm, {}, {})
        for i in range(3):
            steps(mesh, model, optimizer, i, i + 1)
            pc.save(tmp_path, model, optimizer)
        pc.save(tmp_path, model, optimizer)  # of the same step once more

    run_ranks(work, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000002", "step-000000003"]


def test_load_of_nothing_and_of_another_model_is_an_error(tmp_path):
    def work(comm):
        mesh, model, optimizer = prepare(comm, {}, {})
        with pytest.raises(UsageError, match="there is no checkpoint in"):
            pc.load(tmp_path, model)
        pc.save(tmp_path, model, optimizer)
        other = pc.parallelize(torch.nn.Linear(2, 2), mesh)
        with pytest.raises(UsageError, match="has no tensor 'weight': it lacks 2 of this model's"):
            pc.load(tmp_path, other)

    run_ranks(work, 1)


def test_rank_that_cannot_write_fails_all_and_the_one_before_stays(tmp_path, monkeypatch):
    from pycoll.parallel.trainer import checkpoint

    def work(comm):
        mesh, model, optimizer = prepare(comm, {}, {})
        steps(mesh, model, optimizer, 0, 1)
        pc.save(tmp_path, model, optimizer)
        steps(mesh, model, optimizer, 1, 2)
        if comm.rank == 1:

            def full(*args):
                raise OSError("no space left")

            monkeypatch.setattr(checkpoint, "write", full)
        with pytest.raises(SystemError, match="1 of 2 ranks could not write"):
            pc.save(tmp_path, model, optimizer)
        return pc.load(tmp_path, model, optimizer), len(checkpoints(tmp_path))

    assert run_ranks(work, 2) == [(None, 1)] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_during_a_save_leaves_the_checkpoint_before_whole(victim, tmp_path, monkeypatch):
    from pycoll.parallel.trainer import checkpoint

    def work(comm):
        mesh, model, optimizer = prepare(comm, {}, {"zero": 1})
        steps(mesh, model, optimizer, 0, HALF)
        pc.save(tmp_path, model, optimizer, extra={"place": HALF})
        steps(mesh, model, optimizer, HALF, HALF + 1)
        if comm.rank == victim:
            write = checkpoint.write

            def die(path, *args):
                write(path, *args)
                path.write_bytes(path.read_bytes()[:100])  # half of it has reached the disk
                os.kill(os.getpid(), signal.SIGKILL)

            monkeypatch.setattr(checkpoint, "write", die)
        pc.save(tmp_path, model, optimizer)

    with pytest.raises(PeerDiedError):
        run_ranks(work, 2)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{HALF:09d}"]
    assert_goes_on(tmp_path, "tp2")
