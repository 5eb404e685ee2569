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

from torch import nn

from pycoll.communicator import Communicator
from pycoll.errors import SystemError, UsageError
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.trainer.checkpoint_files import DamageError, Index, Reader, write
from pycoll.parallel.trainer.checkpoint_folders import begin, candidates, checkpoints, newest
from pycoll.parallel.trainer.optimizers import Optimizer
from pycoll.parallel.trainer.owner import trainer_of
from pycoll.parallel.trainer.saved_objects import Objects, averages, check
from pycoll.parallel.trainer.saving import Saving
from pycoll.parallel.trainer.state_dicts import persistent_buffers
from pycoll.parallel.trainer.trainer import Trainer
from pycoll.parallel.trainer.training_state import description, held_state, install

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
    world = trainer.mesh.whole.world
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
    index = description(trainer, optimizer, objects) | {"mesh": trainer.mesh.sizes, "extra": extra}
    state_here = held_state(trainer, optimizer, objects) if trainer.mesh.writes_files else ()
    owned = [held for held in state_here if held.owned]
    copies = {held.name: held.flat.to("cpu", copy=True) for held in owned}
    places = {held.name: held.place.as_json() for held in owned}
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
            index, reader = checked
            apply = partial(install, trainer, optimizer, objects, vars(index), reader)
            _, damage = _on_all_ranks(world, apply)
        if not damage:
            trainer.reducer.publish()
            trainer.clear()
            world.barrier()
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


__all__ = ["checkpoints", "load", "newest", "save", "save_in_background"]
