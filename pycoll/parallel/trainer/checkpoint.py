"""Checkpoints that any mesh can write and any mesh can load: whole tensors in pieces.

A checkpoint is a folder with `index.json` and one safetensors file per rank. A file holds the
pieces that its rank owns; its header gives the place of each piece in the whole tensor. The folder
gets its final name last, after all data is on the disk: a crash before leaves the previous
checkpoint intact.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.errors import SystemError, UsageError
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.data.reducer import Piece
from pycoll.parallel.trainer.checkpoint_files import Reader, fsync, write
from pycoll.parallel.trainer.optimizers import Optimizer, trainer_of
from pycoll.parallel.trainer.trainer import Trainer

_STEP = "step-{:09d}"


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint. Collective; every rank writes what it owns.

    Args:
        folder: Folder of the checkpoints, reachable by all ranks; created if missing.
        model: A model that `parallelize` returned.
        optimizer: An optimizer that `pc.optimizer` returned.
        extra: Any JSON-serializable value, such as the place in the data; rank 0's is saved.
        keep: Number of newest checkpoints to keep.

    Returns:
        The checkpoint's folder.

    Raises:
        SystemError: A rank could not write; the existing checkpoints are unchanged.

    Cost: each element is written once, by one rank; two barriers.
    """
    trainer = trainer_of(model)
    world = trainer.mesh.world
    folder = Path(folder)
    final = folder / _STEP.format(trainer.step_idx)
    making = folder / f".making-{final.name}"
    if world.rank == 0:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
    world.barrier()
    problem = ""
    try:
        write(making / f"rank-{world.rank:05d}.safetensors", *_mine(trainer, optimizer))
    except OSError as error:
        problem = str(error)
    failed = world.all_reduce(torch.tensor([int(bool(problem))]))
    if int(failed):
        raise SystemError(
            f"save: {int(failed)} of {world.size} ranks could not write to {making}"
            + (f"; this one: {problem}" if problem else "")
        )
    if world.rank == 0:
        index = {
            "version": 1,
            "step": trainer.step_idx,
            "seed": trainer.positions.seed,
            "mesh": trainer.mesh.sizes,
            "files": sorted(path.name for path in making.glob("rank-*")),
            "groups": [] if optimizer is None else _groups(optimizer),
            "extra": extra,
        }
        text = making / "index.json"
        text.write_text(json.dumps(index, indent=1) + "\n")
        fsync(text)
        fsync(making)
        if final.exists():  # a checkpoint of the same step is replaced
            final.rename(folder / f".old-{final.name}")
        making.rename(final)
        fsync(folder)
        for old in [*folder.glob(".old-*"), *checkpoints(folder)[:-keep]]:
            shutil.rmtree(old, ignore_errors=True)
    world.barrier()
    return final


def load(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Reads the newest checkpoint, written on any mesh. Collective.

    Args:
        folder: Folder of the checkpoints, or one checkpoint.
        model: A model that `parallelize` returned; its parameters and buffers are overwritten.
        optimizer: An optimizer of `pc.optimizer` with the same groups as the saved one.

    Returns:
        The saved `extra`.

    Raises:
        UsageError: There is no checkpoint, or it belongs to another model.

    Cost: each rank reads the pieces that it needs.
    """
    trainer = trainer_of(model)
    found = newest(folder)
    if found is None:
        raise UsageError(f"load: there is no checkpoint in {folder}")
    index = json.loads((found / "index.json").read_text())
    reader = Reader(found, index["files"])
    missing = [name for name in trainer.placements if name not in reader]
    if missing:
        raise UsageError(
            f"load: {found} has no tensor {missing[0]!r}: it lacks {len(missing)} of this model's"
        )
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            if name not in trainer.reducer.names:
                parameter.copy_(trainer.placements[name].take(reader.whole(name)))
        for name, buffer in _buffers(model):
            buffer.copy_(reader.whole(f"buffer:{name}"))
        for name, piece in trainer.reducer.pieces.items():
            piece.value.copy_(_cut(piece, reader.whole(name)).view_as(piece.value))
    trainer.reducer.publish()
    if optimizer is not None:
        _load_state(optimizer, reader, index["groups"])
    trainer.step_idx = index["step"]
    trainer.positions.seed = index["seed"]
    trainer.clear()
    trainer.mesh.world.barrier()
    return index["extra"]


def checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(path for path in Path(folder).glob("step-*") if (path / "index.json").exists())


def newest(folder: str | Path) -> Path | None:
    """The newest checkpoint in a folder, or the folder itself; None if there is none."""
    if (Path(folder) / "index.json").exists():
        return Path(folder)
    return next(reversed(checkpoints(folder)), None)


def _mine(trainer: Trainer, optimizer: Optimizer | None) -> tuple[dict[str, Tensor], dict]:  # type: ignore[type-arg]
    """The tensors that this rank writes, and the place of each in its whole tensor."""
    tensors: dict[str, Tensor] = {}
    places: dict[str, Any] = {}

    def put(name: str, value: Tensor, placement: Placement, start: int) -> None:
        tensors[name] = value.detach().reshape(-1)
        places[name] = {
            "shape": placement.shape,
            "dim": placement.dim,
            "ranges": placement.ranges,
            "start": start,
        }

    for name, piece in trainer.reducer.pieces.items():
        if not piece.owned:
            continue
        put(name, piece.value, piece.placement, piece.start)
        state = {} if optimizer is None else optimizer.inner.state.get(piece.value, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() == piece.value.numel() and value.dim():
                put(f"state:{key}:{name}", value, piece.placement, piece.start)
            else:  # such as the number of steps
                value = torch.as_tensor(value)
                put(f"state:{key}:{name}", value, Placement(tuple(value.shape)), 0)
    if trainer.mesh.rank("dp") == trainer.mesh.rank("cp") == 0:  # each ep rank has experts
        frozen = [n for n in trainer.placements if n not in trainer.reducer.names]
        for name in frozen:
            put(name, trainer.parameters[name], trainer.placements[name], 0)
        for name, buffer in _buffers(trainer.model):
            put(f"buffer:{name}", buffer, Placement(tuple(buffer.shape)), 0)
    return tensors, places


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Persistent buffers of the model."""
    state = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in state]


def _cut(piece: Piece, whole: Tensor) -> Tensor:
    local = piece.placement.take(whole).reshape(-1)
    return local[piece.start : piece.start + piece.value.numel()]


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group, such as its learning rate."""
    return [
        {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        for group in optimizer.inner.param_groups
    ]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None), list, tuple))


def _load_state(optimizer: Optimizer, reader: Reader, groups: list[dict[str, Any]]) -> None:
    if len(groups) != len(optimizer.inner.param_groups):
        raise UsageError(
            f"load: the checkpoint's optimizer has {len(groups)} groups of parameters, this one "
            f"{len(optimizer.inner.param_groups)}"
        )
    for group, saved in zip(optimizer.inner.param_groups, groups, strict=True):
        group.update(saved)
    for name, piece in optimizer.trainer.reducer.pieces.items():
        state: dict[str, Any] = {}
        for key in reader.states(name):
            whole = reader.whole(f"state:{key}:{name}")
            if tuple(whole.shape) == piece.placement.shape and whole.dim():
                state[key] = _cut(piece, whole).view_as(piece.value).clone()
            else:
                state[key] = whole.clone()
        if state:
            optimizer.inner.state[piece.value] = state


__all__ = ["checkpoints", "load", "newest", "save"]
