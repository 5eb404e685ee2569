"""Weights in the format of Hugging Face: safetensors files, read by parts and written whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core import deferred
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.trainer.gather_full import put_together
from pycoll.parallel.trainer.owner import trainer_of
from pycoll.parallel.trainer.state_dicts import persistent_buffers
from pycoll.parallel.trainer.trainer import Trainer

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Files:
    """The tensors of a folder of safetensors files, or of one file; they are read on demand."""

    def __init__(self, path: Path) -> None:
        """Reads the names.

        Raises:
            UsageError: There is no such file.
        """
        self._open: dict[Path, Any] = {}
        self._paths: dict[str, Path] = {}
        if (path / _INDEX).exists():
            names = json.loads((path / _INDEX).read_text())["weight_map"]
            self._paths = {name: path / file for name, file in names.items()}
            return
        one = path / _ONE if path.is_dir() else path
        if not one.exists():
            raise UsageError(
                f"load_pretrained: there is no {_INDEX} or {_ONE} in {path}, and it is no file"
            )
        self._paths = dict.fromkeys(self._file(one).keys(), one)

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def part(self, name: str, placement: Placement | None) -> Tensor:
        """A part of a tensor; the rest of it is not read. None: all of it."""
        stored = self._slice(name)
        if placement is None or placement.dim is None:
            whole: Tensor = stored[...] if stored.get_shape() else self._tensor(name)
            return whole
        parts = [stored[_range(placement.dim, *of)] for of in placement.ranges]
        return torch.cat(parts, placement.dim)

    def _slice(self, name: str) -> Any:
        return self._file(self._paths[name]).get_slice(name)

    def _tensor(self, name: str) -> Tensor:
        found: Tensor = self._file(self._paths[name]).get_tensor(name)
        return found

    def _file(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


def _range(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    """The index of a range along one dimension."""
    return (slice(None),) * dim + (slice(start, stop),)


@dataclass(slots=True)
class Stored:
    """A parameter on "meta" whose values are in a file; as `deferred.Later`."""

    files: Files
    name: str
    placement: Placement | None = field(default=None)

    def part(self, dtype: torch.dtype) -> Tensor:
        """This rank's part."""
        return self.files.part(self.name, self.placement).to(dtype)

    def write(self, into: Tensor) -> None:
        """Writes this rank's part."""
        into.copy_(self.files.part(self.name, self.placement))


def load_pretrained(
    model: nn.Module, path: str | Path, rename: Callable[[str], str] | None = None
) -> list[str]:
    """Gives a model the weights of a folder in the format of Hugging Face.

    Before `parallelize`, a model that was made on the device "meta" takes no memory: `parallelize`
    then reads each rank's parts, and no weight is made or read twice. It may also be a model of the
    CPU, or one that `parallelize` returned.

    Args:
        model: The model; its parameters get the values of the same names.
        path: A folder with `model.safetensors`, or with several files and their
            `model.safetensors.index.json`, that all ranks reach; or one file.
        rename: Returns the name in the files for a name in the model; None: they are equal.

    Returns:
        The names in the files that the model does not have; those of other stages are among them
        after `parallelize` with pp.

    Raises:
        UsageError: A parameter is not in the files, or has another shape there.

    Cost: each rank reads its parts. With ZeRO 1 and 2 of a parallelized model, an all_gather.
    """
    files = Files(Path(path))
    trainer = _trainer_of(model)
    whole = {} if trainer is None else trainer.placements
    named = dict(model.named_parameters()) if trainer is None else trainer.parameters
    names = _names(model, named, files, rename or (lambda name: name))
    for name, parameter in named.items():
        shape = whole[name].shape if name in whole else parameter.shape
        if files.shape(names[name]) != tuple(shape):
            raise UsageError(
                f"load_pretrained: {names[name]!r} has shape {files.shape(names[name])} in {path}, "
                f"expected {tuple(shape)}: it belongs to another model"
            )
    with torch.no_grad():
        if trainer is not None:
            _fill(trainer, files, names)
        for name, parameter in named.items():
            if parameter.is_meta:
                deferred.defer_by(parameter, Stored(files, names[name]))
            elif trainer is None:
                parameter.copy_(files.part(names[name], None))
        for name, buffer in persistent_buffers(model):
            if name in names and buffer.is_meta:
                deferred.defer_by(buffer, Stored(files, names[name]))
            elif name in names:
                buffer.copy_(files.part(names[name], None))
    return [name for name in files if name not in names.values()]


def _trainer_of(model: nn.Module) -> Trainer | None:
    with suppress(UsageError):
        return trainer_of(model)
    return None


def _names(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    files: Files,
    rename: Callable[[str], str],
) -> dict[str, str]:
    """The name in the files for each parameter, and for each buffer that is there."""
    names: dict[str, str] = {}
    # Files have a tied parameter once, and a stage may know it by its second name alone.
    aliases = {id(parameter): [name] for name, parameter in named.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    missing: list[str] = []
    for name, parameter in named.items():
        there = [rename(alias) for alias in aliases[id(parameter)] if rename(alias) in files]
        if there:
            names[name] = there[0]
        else:
            missing.append(name)
    if missing:
        raise UsageError(
            f"load_pretrained: the files have no {rename(missing[0])!r}, which {len(missing)} of "
            f"this model's parameters lack: it belongs to another model, or give `rename`"
        )
    buffers = {name: rename(name) for name, _ in persistent_buffers(model)}
    return names | {name: there for name, there in buffers.items() if there in files}


def _fill(trainer: Trainer, files: Files, names: dict[str, str]) -> None:
    """Overwrites the parameters of a parallelized model."""
    pieces = trainer.reducer.pieces
    for name, parameter in trainer.parameters.items():
        if name in pieces:
            piece = pieces[name]
            local = files.part(names[name], trainer.placements[name]).reshape(-1)
            part = local[piece.start : piece.start + piece.value.numel()]
            piece.value.copy_(part.view_as(piece.value))
        elif name not in trainer.reducer.names:  # frozen
            parameter.copy_(files.part(names[name], trainer.placements[name]))
    trainer.reducer.publish()
    trainer.clear()


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    max_bytes: int = 5_000_000_000,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Writes a parallelized model's weights in the format of Hugging Face. Collective.

    Args:
        model: A model that `parallelize` returned, on any mesh.
        folder: Gets `model.safetensors`, or several files and `model.safetensors.index.json`.
        max_bytes: Largest size of a file; a larger tensor has a file of its own.
        rename: Returns the name in the files for a name in the model; None: they are equal.

    Raises:
        SystemError: Rank 0 could not write.

    Cost: an all_reduce of each parameter over all ranks. Each rank needs memory for one file.
    """
    from safetensors.torch import save_file

    trainer, folder, rename = trainer_of(model), Path(folder), rename or (lambda name: name)
    is_first = trainer.mesh.whole.world.rank == 0
    shards = _in_files(trainer, max_bytes)
    places: dict[str, str] = {}
    buffers = {name: buffer.detach().clone() for name, buffer in persistent_buffers(model)}
    total = 0
    for i, names in enumerate(shards):
        tensors = _whole(trainer, names)
        if i == 0:
            tensors |= buffers
        file = _ONE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
            named = {rename(name): tensor.contiguous() for name, tensor in tensors.items()}
            save_file(named, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(named, file)
            total += sum(tensor.nbytes for tensor in named.values())
    if is_first and len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
    trainer.mesh.whole.world.barrier()


def _in_files(trainer: Trainer, max_bytes: int) -> list[list[str]]:
    """The names of all ranks' parameters, by file; identical on all ranks."""
    mine = {
        name: torch.Size(trainer.placements[name].shape).numel() * parameter.element_size()
        for name, parameter in trainer.parameters.items()
    }
    sizes: dict[str, int] = {}
    for of_rank in gather_objects(mine, trainer.mesh.world):
        sizes |= of_rank
    shards: list[list[str]] = [[]]
    held = 0
    for name, nbytes in sizes.items():
        if shards[-1] and held + nbytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    return shards


def _whole(trainer: Trainer, names: list[str]) -> dict[str, Tensor]:
    """Whole parameters in the dtypes of the model. Collective."""
    pieces = {name: piece for name, piece in trainer.reducer.pieces.items() if name in names}
    learned = put_together(trainer, {n: (piece, piece.value) for n, piece in pieces.items()})
    frozen = {
        name: ([*trainer.placements[name].shape], str(parameter.dtype).removeprefix("torch."))
        for name, parameter in trainer.parameters.items()
        if name in names and name not in trainer.reducer.names
    }
    dtypes = {
        name: str(parameter.dtype).removeprefix("torch.")
        for name, parameter in trainer.parameters.items()
        if name in names
    }
    world = trainer.mesh.line(*trainer.mesh.sizes)
    found = gather_objects([frozen, dtypes], world.comm)
    for name, (shape, dtype) in {k: v for of, _ in found for k, v in of.items()}.items():
        # Several ranks have the same values; the others have less than any value.
        whole = torch.full(shape, -torch.inf, dtype=getattr(torch, dtype))
        if name in frozen:
            trainer.placements[name].put(trainer.parameters[name].detach(), whole)
        learned[name] = world.all_reduce(whole, "max")
    of_model = {k: v for _, of in found for k, v in of.items()}
    return {name: learned[name].to(getattr(torch, of_model[name])) for name in names}


__all__ = ["load_pretrained", "save_pretrained"]
