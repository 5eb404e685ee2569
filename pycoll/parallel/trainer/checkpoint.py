"""Checkpoints that any mesh can write and any mesh can load: whole tensors in pieces.

A checkpoint is a folder with `index.json` and one safetensors file per rank. A file holds the
pieces that its rank owns; its header gives the place of each piece in the whole tensor. The folder
gets its final name last, after all data is on the disk: a crash before leaves the previous
checkpoint intact. A load checks checksums, and takes the previous checkpoint if one is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.communicator import Communicator
from pycoll.errors import SystemError, UsageError
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.trainer.checkpoint_files import DamageError, Index, Reader, write
from pycoll.parallel.trainer.checkpoint_folders import begin, candidates, checkpoints, newest
from pycoll.parallel.trainer.fused import OWN
from pycoll.parallel.trainer.optimizers import Optimizer
from pycoll.parallel.trainer.owner import trainer_of
from pycoll.parallel.trainer.pieces import is_of_elements
from pycoll.parallel.trainer.saved_objects import Objects, averages, check, restore, states
from pycoll.parallel.trainer.saving import Saving
from pycoll.parallel.trainer.state_dicts import persistent_buffers
from pycoll.parallel.trainer.trainer import Trainer

_STEP = "step-{:09d}"


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    state: Objects | None = None,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint. Collective; every rank writes what it owns.

    It also removes what earlier saves left in the folder when they were killed, so only one job may
    write to a folder at a time.

    Args:
        folder: Folder of the checkpoints, reachable by all ranks; created if missing.
        model: A model that `parallelize` returned.
        optimizer: An optimizer that `pc.optimizer` returned.
        extra: Any JSON-serializable value, such as the place in the data; rank 0's is saved.
        state: Objects whose state is saved, by name: a `pc.loader`, a scheduler, a `pc.GradScaler`,
            a `pc.EMA`, a `pc.RNG`, or any other with `state_dict` and `load_state_dict`.
        keep: Number of newest checkpoints to keep.

    Returns:
        The checkpoint's folder.

    Raises:
        SystemError: A rank could not write; the existing checkpoints are unchanged.
        UsageError: The state of an object is more than numbers, texts and tensors.

    Cost: each element is written once, by one rank; a CRC-32 of each byte; memory of what the rank
        writes; a barrier and some small all_gathers.
    """
    return save_in_background(folder, model, optimizer, extra=extra, state=state, keep=keep).wait()


def save_in_background(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    state: Objects | None = None,
    keep: int = 2,
) -> Saving:
    """Like `save`, but training may go on while a thread writes a copy. Collective.

    The next save or load waits for it and raises its error, as `wait()` of the result does. A
    script waits for its last one before it ends.

    Args:
        folder: As in `save`, like the others.

    Returns:
        The save, with `path` and `wait()`.

    Raises:
        SystemError: The folder cannot be made, or the save before has failed.
        UsageError: The state of an object is more than numbers, texts and tensors.

    Cost: a copy of what the rank writes, a barrier and small all_gathers; a thread does the rest.
    """
    trainer, objects = trainer_of(model), state or {}
    trainer.finish_saving()
    world = trainer.mesh.world
    folder = Path(folder)
    final = folder / _STEP.format(trainer.step_idx)
    making = folder / f".making-{final.name}"
    problem = ""
    try:
        if world.rank == 0:
            begin(folder, final.name)
    except OSError as error:
        problem = str(error)
    if problem := gather_objects(problem, world)[0]:
        raise SystemError(f"save: rank 0 could not make {making}: {problem}")
    index = {
        "step": trainer.step_idx,
        "seed": trainer.positions.seed,
        "mesh": trainer.mesh.sizes,
        "groups": [] if optimizer is None else _groups(optimizer),
        "extra": extra,
        "objects": states(objects),
    }
    tensors, places = _mine(trainer, optimizer, objects)
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    name = f"rank-{world.rank:05d}.safetensors"
    saving = Saving(
        world, final, making, lambda: (name, write(making / name, copies, places)), index, keep
    )
    trainer.finish_saving = saving.wait
    return saving


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    state: Objects | None = None,
) -> Any:
    """Reads the newest checkpoint that is not damaged, written on any mesh. Collective.

    All ranks take the same checkpoint. If a rank finds damage in one, all ranks skip it and try the
    one before; rank 0 warns with a sentence that names the file. The model is overwritten only
    after all files of the checkpoint have been checked.

    Args:
        folder: Folder of the checkpoints, or one checkpoint.
        model: A model that `parallelize` returned; its parameters and buffers are overwritten.
        optimizer: An optimizer of `pc.optimizer` with the same groups as the saved one.
        state: Objects that get their saved state back, by the names that `save` was given.

    Returns:
        The saved `extra`.

    Raises:
        UsageError: There is no checkpoint, each one is damaged, it belongs to another model, or it
            has no state of an object.

    Cost: the ranks together read each file once to check it; then each rank reads the pieces that
        it needs.
    """
    trainer, objects = trainer_of(model), state or {}
    trainer.finish_saving()
    world = trainer.mesh.world
    # Rank 0's list: another host may not see a new folder yet.
    found = candidates(Path(folder)) if world.rank == 0 else []
    paths = [Path(path) for path in gather_objects([str(path) for path in found], world)[0]]
    if not paths:
        raise UsageError(f"load: there is no checkpoint in {folder}")
    damages: list[str] = []
    for path in paths:
        checked, damage = _on_all_ranks(world, partial(_checked, trainer, optimizer, objects, path))
        if checked is not None:
            install = partial(_install, trainer, optimizer, objects, *checked)
            _, damage = _on_all_ranks(world, install)
        if not damage:
            trainer.reducer.publish()
            trainer.clear()
            world.barrier()
            index = checked[0]
            if not index.has_checksums:
                _warn(world, f"load: {path} has no checksums, so damage is not found: save it anew")
            return index.extra
        damages.append(damage)
        if len(paths) > 1:
            _warn(world, f"load: {path.name} is skipped: {damage}")
    raise UsageError(f"load: no checkpoint in {folder} can be read: {'; '.join(damages)}")


def _on_all_ranks(world: Communicator, action: Callable[[], Any]) -> tuple[Any, str]:
    """Runs the action on all ranks: its result, or the damage that the first of them has found.

    Raises:
        UsageError: The action raised it on a rank.
    """
    result, damage, misuse = None, "", ""
    try:
        result = action()
    except DamageError as error:
        damage = str(error)
    except UsageError as error:
        misuse = str(error)
    outcomes = gather_objects([damage, misuse], world)
    for rank, (damage, _) in enumerate(outcomes):
        if damage:
            return None, damage + (f" (on rank {rank})" if world.size > 1 else "")
    for text in (misuse, *(text for _, text in outcomes)):
        if text:
            raise UsageError(text)
    return result, ""


def _warn(world: Communicator, text: str) -> None:
    if world.rank == 0:
        warnings.warn(text, stacklevel=3)


def _checked(
    trainer: Trainer, optimizer: Optimizer | None, objects: Objects, path: Path
) -> tuple[Index, Reader]:
    """Opens a checkpoint, and checks this rank's share of its files."""
    world = trainer.mesh.world
    index = Index.read(path)
    reader = Reader(path, index)
    reader.check(sorted(index.files)[world.rank :: world.size])
    check(objects, index.objects)
    _check_fit(trainer, optimizer, objects, path, index, reader)
    return index, reader


def _check_fit(
    trainer: Trainer,
    optimizer: Optimizer | None,
    objects: Objects,
    path: Path,
    index: Index,
    reader: Reader,
) -> None:
    """Raises UsageError if the checkpoint belongs to another model or optimizer."""
    needed = {name: placement.shape for name, placement in trainer.placements.items()}
    needed |= {f"buffer:{name}": tuple(b.shape) for name, b in persistent_buffers(trainer.model)}
    needed |= {name: piece.placement.shape for name, piece, _ in averages(objects, trainer)}
    missing = [name for name in needed if name not in reader]
    if missing:
        raise UsageError(
            f"load: {path} has no tensor {missing[0]!r}: it lacks {len(missing)} of this model's"
        )
    for name, shape in needed.items():
        if reader.shape(name) != tuple(shape):
            raise UsageError(
                f"load: tensor {name!r} has shape {reader.shape(name)} in {path}, expected "
                f"{tuple(shape)}: it belongs to another model"
            )
    if optimizer is not None and len(index.groups) != len(optimizer.inner.param_groups):
        raise UsageError(
            f"load: the optimizer in {path} has {len(index.groups)} groups of parameters, expected "
            f"{len(optimizer.inner.param_groups)}"
        )


def _install(
    trainer: Trainer,
    optimizer: Optimizer | None,
    objects: Objects,
    index: Index,
    reader: Reader,
) -> None:
    """Overwrites the model, the optimizer and the states of objects."""
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            if name not in trainer.reducer.names:
                parameter.copy_(trainer.placements[name].take(reader.whole(name)))
        for name, buffer in persistent_buffers(trainer.model):
            buffer.copy_(reader.whole(f"buffer:{name}"))
        for name, piece in trainer.reducer.pieces.items():
            piece.value.copy_(piece.cut(reader.whole(name)).view_as(piece.value))
        for name, piece, average in averages(objects, trainer):
            average.copy_(piece.cut(reader.whole(name)).view_as(average))
    if optimizer is not None:
        _load_state(optimizer, reader, index.groups)
    restore(objects, index.objects)
    trainer.step_idx = index.step
    trainer.positions.seed = index.seed


def _mine(
    trainer: Trainer, optimizer: Optimizer | None, objects: Objects
) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
            if is_of_elements(value, piece.value):
                put(f"state:{key}:{name}", value, piece.placement, piece.start)
            else:  # such as the number of steps
                value = torch.as_tensor(value)
                put(f"state:{key}:{name}", value, Placement(tuple(value.shape)), 0)
    for name, piece, average in averages(objects, trainer):
        if piece.owned:
            put(name, average, piece.placement, piece.start)
    if trainer.mesh.rank("dp") == trainer.mesh.rank("cp") == 0:  # each ep rank has experts
        frozen = [n for n in trainer.placements if n not in trainer.reducer.names]
        for name in frozen:
            put(name, trainer.parameters[name], trainer.placements[name], 0)
        for name, buffer in persistent_buffers(trainer.model):
            put(f"buffer:{name}", buffer, Placement(tuple(buffer.shape)), 0)
    return tensors, places


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group, such as its learning rate."""
    return [
        {key: value for key, value in group.items() if key not in OWN and _is_plain(value)}
        for group in optimizer.inner.param_groups
    ]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None), list, tuple))


def _load_state(optimizer: Optimizer, reader: Reader, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.inner.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key not in OWN})
    own = optimizer.inner.param_groups
    counts_on_device = any(group.get("capturable") or group.get("fused") for group in own)
    for name, piece in optimizer.trainer.reducer.pieces.items():
        state: dict[str, Any] = {}
        for key in reader.states(name):
            whole = reader.whole(f"state:{key}:{name}")
            if tuple(whole.shape) == piece.placement.shape and whole.dim():
                part = piece.cut(whole).view_as(piece.value)
                state[key] = part.to(piece.value.device, copy=True)
            else:  # such as the number of steps
                state[key] = whole.to(piece.value.device if counts_on_device else "cpu", copy=True)
        optimizer.inner.state.pop(piece.value, None)
        if state:
            optimizer.inner.state[piece.value] = state


__all__ = ["checkpoints", "load", "newest", "save", "save_in_background"]
