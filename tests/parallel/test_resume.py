"""Jobs that are killed and go on: the state of everything, and saves by a thread."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from mesh_cases import in_one_world
from tiny_gpt import GPT, PLAN, batches
from torch.optim import lr_scheduler

from pycoll import PeerDiedError, SystemError, UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.core.plain_values import decode, encode
from pycoll.parallel.trainer.checkpoint import checkpoints

EPOCHS, NUM_SAMPLES, KILLED_AT, EVERY = 3, 14, 7, 2


class Tokens:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(29, (9,), generator=torch.Generator().manual_seed(i))
        return tokens[:-1], tokens[1:]


def train(comm, sizes, options, folder: Path | None, victim: int | None = None):
    """Twelve steps, with a save by a thread after every second; the victim dies in step 7."""
    mesh = pc.mesh(**sizes, comm=comm)
    random.seed(comm.rank)
    with pc.keyed_init(mesh, seed=3):
        model = GPT()
    model = pc.parallelize(model, mesh, tp=PLAN, **options)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), clip=0.5)
    state = {
        "loader": pc.loader(Tokens(), 4, mesh, seed=2),
        "schedule": lr_scheduler.MultiStepLR(optimizer, [3, 9], gamma=0.5),
        "average": pc.EMA(model, 0.9),
        "scaler": pc.GradScaler("cpu", init_scale=2.0, growth_interval=2),
        "random": pc.RNG(mesh),
    }
    if folder is not None and checkpoints(folder):
        pc.load(folder, model, optimizer, state=state)
    loader, step = state["loader"], pc.trainer_of(model).step_idx
    drawn = []
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            if step == KILLED_AT and comm.rank == victim:
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                signal.setitimer(signal.ITIMER_REAL, 0.002)  # in the midst of the step
            drawn.append(random.random())
            model.step(x, y, loss=pc.cross_entropy)
            optimizer.step()
            state["schedule"].step()
            state["average"].update()
            state["scaler"].scale(torch.ones(()))
            step += 1
            if folder is not None and step % EVERY == 0:
                pc.save_in_background(folder, model, optimizer, state=state)
    pc.trainer_of(model).finish_saving()
    with state["average"].weights():
        averages = pc.whole_weights(model)
    found = pc.whole_weights(model), averages, optimizer.param_groups[0]["lr"]
    mesh.close()
    return *found, drawn[-1], state["scaler"].state_dict()


def assert_same_bits(one, other) -> None:
    for a, b in zip(one[:2], other[:2], strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert one[2:] == other[2:]


def assert_goes_on(sizes, options, folder, victim=1) -> None:
    expected = run_ranks(train, 2, sizes, options, None)
    with pytest.raises(PeerDiedError):
        run_ranks(train, 2, sizes, options, folder, victim)
    # The thread may not have written that of step 6, or not have removed that of step 2 after it.
    assert 0 < len(checkpoints(folder)) <= 3
    resumed = run_ranks(train, 2, sizes, options, folder)
    for one, other in zip(expected, resumed, strict=True):
        assert_same_bits(one, other)
    assert len(checkpoints(folder)) == 2


def test_a_killed_job_goes_on_with_the_bits_of_the_uninterrupted_one(tmp_path):
    """Weights, averages, learning rate, scale and random numbers; three times a tiny training."""
    assert_goes_on({"dp": 2}, {"zero": 1}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"dp": 2}, {"zero": 3}), ({"tp": 2}, {}), ({"pp": 2}, {"pp": "blocks"})],
    ids=str,
)
def test_a_killed_job_goes_on_with_the_same_bits_on_every_mesh(tmp_path, sizes, options):
    assert_goes_on(sizes, options, tmp_path, victim=0)


def small(comm, **sizes):
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=comm.size):  # so that a load shows
        model = GPT(depth=1)
    model = pc.parallelize(model, mesh, tp=PLAN)
    return mesh, model


def averages_elsewhere(comm, folder: Path, sizes: dict, writes: bool):
    mesh, model = small(comm, **sizes)
    ema = pc.EMA(model, 0.5)
    if writes:
        for average in ema.averages.values():
            average += 1
        pc.save(folder, model, state={"ema": ema})
    else:
        pc.load(folder, model, state={"ema": ema})
    with ema.weights():
        found = pc.whole_weights(model)
    mesh.close()
    return found


def test_averages_move_to_another_mesh(tmp_path):
    saved = in_one_world(averages_elsewhere, [(2, tmp_path, {"tp": 2}, True)])[0][0]
    loaded = in_one_world(averages_elsewhere, [(3, tmp_path, {"dp": 3}, False)])[0]
    for found in loaded:
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def training_while_a_thread_writes(comm, folder: Path, monkeypatch, fails: bool):
    """The thread waits until a further step is done; what it writes is from before."""
    from pycoll.parallel.trainer import checkpoint

    mesh, model = small(comm, dp=-1)
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    write, go_on = checkpoint.write, threading.Event()

    def late(*args):
        assert go_on.wait(30)
        if fails and comm.rank == 1:
            raise OSError("no space left")
        return write(*args)

    monkeypatch.setattr(checkpoint, "write", late)
    x, y = next(batches(1, 4))
    before = pc.whole_weights(model)
    saving = pc.save_in_background(folder, model, optimizer)
    model.step(x, y, loss=pc.cross_entropy)
    optimizer.step()
    there = [path.name for path in folder.glob("step-*")]
    go_on.set()
    if fails:
        with pytest.raises(SystemError, match="1 of 2 ranks could not write"):
            pc.save(folder, model, optimizer)
        monkeypatch.undo()
        pc.save(folder, model, optimizer, keep=1)  # the next one is not concerned
        return [], there
    path = saving.wait()
    pc.load(path, model, optimizer)
    after = pc.whole_weights(model)
    return [name for name in before if not torch.equal(before[name], after[name])], there


@pytest.mark.parametrize("fails", [False, True])
def test_training_goes_on_while_a_thread_writes(tmp_path, monkeypatch, fails):
    found = run_ranks(training_while_a_thread_writes, 2, tmp_path, monkeypatch, fails)
    assert found == [([], [])] * 2
    if fails:
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


class Stateful:
    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_states_that_do_not_fit_are_refused(tmp_path):
    def work(comm):
        mesh, model = small(comm, dp=-1)
        for state, text in [
            ({"a:b": pc.RNG(mesh)}, "'a:b' cannot name an object"),
            ({"it": 3}, "'it' is a int, expected an object with state_dict"),
            ({"it": Stateful(folder=tmp_path)}, "'it' contains a PosixPath"),
        ]:
            with pytest.raises(UsageError, match=text):
                pc.save(tmp_path, model, state=state)
        pc.save(tmp_path, model, state={"random": pc.RNG(mesh)})
        with pytest.raises(UsageError, match=r"no state of 'ema' \(EMA\); it has 'random'"):
            pc.load(tmp_path, model, state={"ema": pc.EMA(model)})

    run_ranks(work, 1)

    def on_two(comm):
        mesh, model = small(comm, dp=-1)
        with pytest.raises(UsageError, match="those of 1 ranks, and this job has 2"):
            pc.load(tmp_path, model, state={"random": pc.RNG(mesh)})

    run_ranks(on_two, 2)


@pytest.mark.pure
def test_plain_values_come_back_as_they_were():
    value = {
        "a": [1, 2.5, None, True, float("inf")],
        3: (1, ("x",)),
        "c": Counter({4: 1}),
        "t": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "s": torch.tensor(7, dtype=torch.int64),
        "n": np.arange(3, dtype=np.uint32),
    }
    back = decode(encode(value, "it"))
    for key in ("t", "s"):
        assert back[key].dtype == value[key].dtype and torch.equal(back.pop(key), value.pop(key))
    assert back["n"].dtype == np.uint32 and (back.pop("n") == value.pop("n")).all()
    assert back == value and type(back["c"]) is Counter
