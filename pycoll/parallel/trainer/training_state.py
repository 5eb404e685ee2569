"""The state of a training: what each rank holds of it, and how a rank takes it over.

Checkpoints write it to files (trainer/checkpoint.py), and elastic trainings copy it to the memory
of other ranks (parallel/recovery).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pycoll.parallel.core.placement import Placement
from pycoll.parallel.features.data.reducer import Piece
from pycoll.parallel.trainer.fused import OWN
from pycoll.parallel.trainer.optimizers import Optimizer
from pycoll.parallel.trainer.pieces import is_of_elements
from pycoll.parallel.trainer.places import Place
from pycoll.parallel.trainer.saved_objects import Objects, averages, restore, states
from pycoll.parallel.trainer.state_dicts import persistent_buffers
from pycoll.parallel.trainer.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Held:
    """A piece of a tensor of the state that this rank holds.

    Attributes:
        name: Name of the tensor: that of a parameter, "buffer:" and its name, "state:", a key of
            the optimizer and a parameter, or "object:", an average and a parameter.
        of: Name of the parameter, or "buffer:" and a name; pieces of one `of` have equal holders.
        flat: The values, flat.
        place: Their place.
        owned: Whether this rank writes them to checkpoints; each element has one owner.
    """

    name: str
    of: str
    flat: Tensor
    place: Place
    owned: bool


def held_state(trainer: Trainer, optimizer: Optimizer | None, objects: Objects) -> Iterator[Held]:
    """All that this rank holds of the state."""

    def held(name: str, of: str, value: Tensor, place: Placement, start: int, owned: bool) -> Held:
        flat = value.detach().reshape(-1)
        return Held(name, of, flat, Place(place, start, flat.numel()), owned)

    def of_piece(name: str, value: Tensor, piece: Piece) -> Held:
        return held(name, piece.name, value, piece.placement, piece.start, piece.owned)

    for name, piece in trainer.reducer.pieces.items():
        yield of_piece(name, piece.value, piece)
        state = {} if optimizer is None else optimizer.inner.state.get(piece.value, {})
        for key, value in state.items():
            if is_of_elements(value, piece.value):
                yield of_piece(f"state:{key}:{name}", value, piece)
            else:  # such as the number of steps
                value = torch.as_tensor(value)
                whole = Placement(tuple(value.shape))
                yield held(f"state:{key}:{name}", name, value, whole, 0, piece.owned)
    for name, piece, average in averages(objects, trainer):
        yield of_piece(name, average, piece)
    is_first = trainer.mesh.rank("dp") == trainer.mesh.rank("cp") == 0  # each ep rank has experts
    frozen = [name for name in trainer.placements if name not in trainer.reducer.names]
    for name in frozen:
        value, placement = trainer.parameters[name], trainer.placements[name]
        yield held(name, name, value, placement, 0, is_first)
    for name, buffer in persistent_buffers(trainer.model):
        name = f"buffer:{name}"
        yield held(name, name, buffer, Placement(tuple(buffer.shape)), 0, is_first)


def description(trainer: Trainer, optimizer: Optimizer | None, objects: Objects) -> dict[str, Any]:
    """What there is beside tensors, as JSON; identical on all ranks. Collective for an RNG.

    Raises:
        UsageError: The state of an object is more than numbers, texts and tensors.
    """
    return {
        "step": trainer.step_idx,
        "seed": trainer.positions.seed,
        "groups": [] if optimizer is None else _groups(optimizer),
        "objects": states(objects),
    }


class WholeTensors(Protocol):
    """The whole tensors of a saved state."""

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""

    def states(self, name: str) -> list[str]:
        """Keys of the optimizer's state for a parameter."""


def install(
    trainer: Trainer,
    optimizer: Optimizer | None,
    objects: Objects,
    described: Mapping[str, Any],
    tensors: WholeTensors,
) -> None:
    """Overwrites the model, the optimizer and the states of objects on this rank.

    `trainer.reducer.publish()` and `trainer.clear()` follow, when all ranks are here.

    Args:
        trainer: The trainer.
        optimizer: Its optimizer.
        objects: The objects that were saved.
        described: What `description` returned.
        tensors: The saved tensors.
    """
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            if name not in trainer.reducer.names:
                parameter.copy_(trainer.placements[name].take(tensors.whole(name)))
        for name, buffer in persistent_buffers(trainer.model):
            buffer.copy_(tensors.whole(f"buffer:{name}"))
        for name, piece in trainer.reducer.pieces.items():
            piece.value.copy_(piece.cut(tensors.whole(name)).view_as(piece.value))
        for name, piece, average in averages(objects, trainer):
            average.copy_(piece.cut(tensors.whole(name)).view_as(average))
    if optimizer is not None:
        _load_state(optimizer, tensors, described["groups"])
    restore(objects, described["objects"])
    trainer.step_idx = described["step"]
    trainer.positions.seed = described["seed"]


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group, such as its learning rate."""
    return [
        {key: value for key, value in group.items() if key not in OWN and _is_plain(value)}
        for group in optimizer.inner.param_groups
    ]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None), list, tuple))


def _load_state(optimizer: Optimizer, tensors: WholeTensors, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.inner.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key not in OWN})
    own = optimizer.inner.param_groups
    counts_on_device = any(group.get("capturable") or group.get("fused") for group in own)
    for name, piece in optimizer.trainer.reducer.pieces.items():
        state: dict[str, Any] = {}
        for key in tensors.states(name):
            whole = tensors.whole(f"state:{key}:{name}")
            if tuple(whole.shape) == piece.placement.shape and whole.dim():
                part = piece.cut(whole).view_as(piece.value)
                state[key] = part.to(piece.value.device, copy=True)
            else:  # such as the number of steps
                state[key] = whole.to(piece.value.device if counts_on_device else "cpu", copy=True)
        optimizer.inner.state.pop(piece.value, None)
        if state:
            optimizer.inner.state[piece.value] = state


__all__ = ["Held", "WholeTensors", "description", "held_state", "install"]
