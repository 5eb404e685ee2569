"""Checkpoints: from any mesh to any mesh, and never half written."""

from __future__ import annotations

import itertools
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from mesh_cases import differences, in_one_world, one_process
from tiny_gpt import GPT, batches

from pycoll import PeerDiedError, SystemError, UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.trainer.checkpoint import checkpoints, newest

HALF, STEPS = 2, 4
LAYOUTS = {
    "one": ({"dp": 1}, {}),
    "dp2_zero1": ({"dp": 2}, {"zero": 1}),
    "tp2": ({"tp": 2}, {}),
    "dp3_zero3": ({"dp": 3}, {"zero": 3}),
    "dp4_zero3_group2": ({"dp": 4}, {"zero": 3, "zero_group": 2}),
    "dp2_tp2_zero2": ({"dp": 2, "tp": 2}, {"zero": 2, "sequence_parallel": True}),
    "pp2_tp2_zero1": ({"pp": 2, "tp": 2}, {"zero": 1}),
    "ep2_cp2_zero2": ({"ep": 2, "cp": 2}, {"zero": 2}),
}

# With sequence_parallel, tp leaves experts whole.
PLAN = {
    "*.qkv": "qkv", "blocks.0.up": "col", "*.out|blocks.0.down": "row", "token|head": "vocab",
}  # fmt: skip


def prepare(comm, sizes: dict, options: dict):
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


def uninterrupted(comm, sizes: dict):
    mesh, model, optimizer = prepare(comm, sizes, {})
    losses = steps(mesh, model, optimizer, 0, STEPS)[HALF:]
    return losses, pc.whole_weights(model), model.seen.tolist()


def first_half(comm, layout: str, folder: Path) -> None:
    mesh, model, optimizer = prepare(comm, *LAYOUTS[layout])
    steps(mesh, model, optimizer, 0, HALF)
    pc.save(folder, model, optimizer, extra={"place": HALF})
    mesh.close()


def second_half(comm, layout: str, folder: Path) -> list[str]:
    """Differences from training without an interruption."""
    mesh, model, optimizer = prepare(comm, *LAYOUTS[layout])
    with torch.no_grad():
        for piece in pc.trainer_of(model).reducer.pieces.values():
            piece.value.fill_(7)
    place = pc.load(folder, model, optimizer)["place"]
    losses = steps(mesh, model, optimizer, place, STEPS)
    got = losses, pc.whole_weights(model), model.seen.tolist()
    mesh.close()
    return list(differences(one_process(uninterrupted), got))


def ranks_of(layout: str) -> int:
    return math.prod(LAYOUTS[layout][0].values())


def assert_goes_on(pairs: list[tuple[str, Path]]) -> None:
    """Training goes on with each layout from the checkpoint in its folder."""
    one_process(uninterrupted)  # before the ranks are forked
    cases = [(ranks_of(layout), layout, folder) for layout, folder in pairs]
    for case, differ in zip(cases, in_one_world(second_half, cases), strict=True):
        assert not any(differ), (case, differ)


def save_all(layouts, folder: Path) -> None:
    in_one_world(first_half, [(ranks_of(name), name, folder / name) for name in layouts])


def test_training_goes_on_from_another_mesh(tmp_path):
    pairs = [("dp2_zero1", "tp2"), ("dp2_tp2_zero2", "pp2_tp2_zero1")]
    save_all([before for before, _ in pairs], tmp_path)
    for name, _ in pairs:
        assert [path.name for path in checkpoints(tmp_path / name)] == [f"step-{HALF:09d}"]
        files = list(newest(tmp_path / name).glob("rank-*.safetensors"))
        assert len(files) == ranks_of(name)
    assert_goes_on([(after, tmp_path / before) for before, after in pairs])


@pytest.mark.slow
def test_training_goes_on_from_every_mesh_to_every_mesh(tmp_path):
    save_all(LAYOUTS, tmp_path)
    assert_goes_on([(after, tmp_path / before) for after in LAYOUTS for before in LAYOUTS])


def test_only_the_newest_are_kept_and_nothing_else_is_left(tmp_path):
    def work(comm):
        mesh, model, optimizer = prepare(comm, {}, {})
        for i in range(3):
            steps(mesh, model, optimizer, i, i + 1)
            pc.save(tmp_path, model, optimizer)
        pc.save(tmp_path, model, optimizer)  # the same step once more

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
                path.write_bytes(path.read_bytes()[:100])  # as if the rest had not reached the disk
                os.kill(os.getpid(), signal.SIGKILL)

            monkeypatch.setattr(checkpoint, "write", die)
        pc.save(tmp_path, model, optimizer)

    with pytest.raises(PeerDiedError):
        run_ranks(work, 2)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{HALF:09d}"]
    assert_goes_on([("tp2", tmp_path)])
