"""Damaged checkpoints: two saved ones, how they are damaged, and the check of what is loaded."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pycoll import parallel as pc

OLDER, NEWER = "step-000000001", "step-000000002"


def prepare(comm) -> tuple[nn.Module, pc.Optimizer]:
    mesh = pc.mesh(dp=-1, comm=comm)
    with pc.keyed_init(mesh, seed=5):
        model = nn.Linear(6, 8)
        model.register_buffer("seen", torch.zeros(3))
    model = pc.parallelize(model, mesh, zero=1)
    return model, pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def step(comm, model, optimizer) -> None:
    x = torch.arange(12, dtype=torch.float32).view(2, 6) / (5 + comm.rank)
    model.step(x, torch.tensor([0, 3]), loss=pc.cross_entropy)
    optimizer.step()
    model.seen += 1
    for group in optimizer.inner.param_groups:
        group["lr"] /= 2


def save_two(comm, folder: Path) -> None:
    """Saves steps 1 and 2, each with other weights, state, options and `extra`."""
    model, optimizer = prepare(comm)
    for place in (1, 2):
        step(comm, model, optimizer)
        pc.save(folder, model, optimizer, extra={"place": place})


def loaded(comm, folder: Path) -> tuple[list[Any], list[str]]:
    """All values after a load into a model with other values, and the warnings."""
    model, optimizer = prepare(comm)
    trainer = pc.trainer_of(model)
    with torch.no_grad():
        for piece in trainer.reducer.pieces.values():
            piece.value.fill_(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = pc.load(folder, model, optimizer)
    values = [extra, trainer.step_idx, trainer.positions.seed, model.seen.tolist()]
    values += [group["lr"] for group in optimizer.inner.param_groups]
    values += [tensor.tolist() for tensor in pc.whole_weights(model).values()]
    for piece in trainer.reducer.pieces.values():
        state = optimizer.inner.state[piece.value]
        values += [[key, value.tolist()] for key, value in sorted(state.items())]
    return values, [str(each.message) for each in caught]


def damage(rng: random.Random, path: Path, before: Path) -> str:
    """Damages a file as disks, copies and crashes do; returns what it did."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    kind = rng.choice(["bit", "bits", "zeros", "noise", "cut", "longer", "empty", "gone", "older"])
    if kind == "bit":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "bits":
        for _ in range(rng.randrange(2, 9)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "noise":
        content[at : at + 16] = rng.randbytes(len(content[at : at + 16]))
    elif kind == "cut":
        del content[at:]
    elif kind == "longer":
        content[at:at] = rng.randbytes(8)
    elif kind == "empty":
        content.clear()
    elif kind == "older":
        content[:] = before.read_bytes()
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{kind} at {at} of {path.name}"


def load_damaged(comm, folder: Path, count: int, first_seed: int) -> tuple[int, list[str]]:
    """Loads `count` damaged checkpoints; returns how many were skipped, and what was wrong."""
    older, _ = loaded(comm, folder / OLDER)
    newer, _ = loaded(comm, folder / NEWER)
    assert older != newer
    files = sorted((folder / NEWER).iterdir())
    assert len(files) == 3
    skipped, wrong = 0, []
    for seed in range(first_seed, first_seed + count):
        rng = random.Random(seed)
        path = rng.choice(files)
        content = path.read_bytes()
        what = f"seed {seed}: {damage(rng, path, folder / OLDER / path.name)}"
        try:
            values, texts = loaded(comm, folder)
            is_skipped = values == older
            if values not in (older, newer):
                wrong.append(f"{what}: other values: {values}")
            elif is_skipped and [NEWER in each and path.name in each for each in texts] != [True]:
                wrong.append(f"{what}: {texts}")
            elif not is_skipped and texts:
                wrong.append(f"{what}: loaded with {texts}")
            skipped += is_skipped
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        path.write_bytes(content)
    return skipped, wrong
