"""State dicts of models whose ranks hold parts; torch.distributed.checkpoint writes and reads them.

`model.state_dict()` of such a model would be one rank's parts under the names of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.trainer.owner import trainer_of
from pycoll.parallel.trainer.trainer import Trainer

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a whole tensor.

    Attributes:
        offsets: Its first element in the whole tensor.
        values: Its values: a view of what the rank holds.
    """

    offsets: Sizes
    values: Tensor


class Parts(Tensor):
    """This rank's parts of a tensor, under its whole shape; torch.distributed.checkpoint knows it.

    Attributes:
        boxes: The parts.
        saved_here: This rank writes them; another one has the same.
    """

    boxes: list[Box]
    saved_here: bool

    @staticmethod
    def of(flat: Tensor, placement: Placement, start: int, *, saved_here: bool) -> Parts:
        """The parts that `flat` holds, elements of a rank's local part from `start` on."""
        made: Parts = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Parts, placement.shape, dtype=flat.dtype, device=flat.device
        )
        made.boxes = [*_boxes(flat.detach().view(-1), placement, start)]
        made.saved_here = saved_here
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise UsageError(
            f"{function}: the entries of pc.state_dict are parts of tensors, for "
            "torch.distributed.checkpoint: pc.whole_weights(model) returns whole ones"
        )

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner

        return [
            planner.WriteItem(
                metadata.MetadataIndex(name, torch.Size(box.offsets)),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    _chunk(box),
                    metadata.TensorProperties.create_from_tensor(box.values),
                    self.size(),
                ),
            )
            for box in (self.boxes if self.saved_here else ())
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(box.values for box in self.boxes if box.offsets == tuple(index.offset))


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), box.values.shape)


def _boxes(flat: Tensor, placement: Placement, start: int) -> Iterator[Box]:
    at, dim = 0, placement.dim
    for offsets, sizes in _rectangles(placement.local_shape, start, start + flat.numel()):
        count = math.prod(sizes)
        values = flat[at : at + count].view(sizes)
        at += count
        if dim is None:
            yield Box(offsets, values)
            continue
        first = 0  # of a range, in the local part
        for low, high in placement.ranges:
            begin = max(offsets[dim], first)
            end = min(offsets[dim] + sizes[dim], first + high - low)
            if begin < end:
                there = (*offsets[:dim], low + begin - first, *offsets[dim + 1 :])
                yield Box(there, values.narrow(dim, begin - offsets[dim], end - begin))
            first += high - low


def _rectangles(shape: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Cuts elements `start` to `stop` of a row-major tensor into offsets and sizes, in order."""
    if not shape or start == stop:
        if start < stop:
            yield (), ()
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        num_rows = (stop - start) // row
        if within or not num_rows:  # a part of one row
            end = min(stop, (index + 1) * row)
            for offsets, sizes in _rectangles(shape[1:], within, end - index * row):
                yield (index, *offsets), (1, *sizes)
            start = end
        else:
            yield (index, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
            start += num_rows * row


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a parallelized model, for torch.distributed.checkpoint.

    `dcp.save(pc.state_dict(model), ...)` writes each element once, under the names and shapes of
    the plain model, which reads it by `dcp.load(model.state_dict(), ...)`. To read:
    `state = pc.state_dict(model); dcp.load(state, ...); pc.load_state_dict(model, state)`.

    Args:
        model: A model that `parallelize` returned, on any mesh.

    Returns:
        For each parameter that this rank has some of, its parts under the whole shape; buffers as
        they are. 16-bit parameters are those in float32 that the optimizer steps.
    """
    trainer = trainer_of(model)
    found: dict[str, Tensor] = {}
    for name, piece in trainer.reducer.pieces.items():
        found[name] = Parts.of(piece.value, piece.placement, piece.start, saved_here=piece.owned)
    mesh = trainer.mesh
    is_first = mesh.rank("dp") == mesh.rank("cp") == 0  # each ep rank has experts
    for name in _frozen(trainer):
        found[name] = Parts.of(
            trainer.parameters[name], trainer.placements[name], 0, saved_here=is_first
        )
    return found | {name: buffer for name, buffer in persistent_buffers(model)}


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads weights and buffers into a parallelized model, on any mesh. Collective.

    Args:
        model: A model that `parallelize` returned.
        state: A state dict of the whole model, identical on all ranks; or what `state_dict`
            returned, after `torch.distributed.checkpoint.load` has filled it.

    Raises:
        UsageError: A tensor is missing, or has another shape.

    Cost: with ZeRO 1 and 2, an all_gather of the parameters over their replicas.
    """
    trainer = trainer_of(model)
    pieces, frozen = trainer.reducer.pieces, _frozen(trainer)
    for name in [*pieces, *frozen]:
        shape = trainer.placements[name].shape
        if name not in state or tuple(state[name].shape) != tuple(shape):
            there = tuple(state[name].shape) if name in state else "missing"
            raise UsageError(
                f"load_state_dict: {name!r} is {there}, expected shape {tuple(shape)}: it belongs "
                "to another model"
            )
    with torch.no_grad():
        for name, piece in pieces.items():
            if not isinstance(state[name], Parts):
                piece.value.copy_(piece.cut(state[name]).view_as(piece.value))
        for name in frozen:
            if not isinstance(state[name], Parts):
                trainer.parameters[name].copy_(trainer.placements[name].take(state[name]))
        for name, buffer in persistent_buffers(model):
            if name in state:
                buffer.copy_(state[name])
        trainer.reducer.publish()
    trainer.clear()


def guard(trainer: Trainer) -> None:
    """Makes `model.state_dict` and `model.load_state_dict` right, or refuses them."""
    model, mesh = trainer.model, trainer.mesh
    axes = [axis for axis in ("pp", "ep") if mesh.size(axis) > 1]
    axes += ["tp"] if any(p.dim is not None for p in trainer.placements.values()) else []
    causes = [f"{axis}={mesh.size(axis)}" for axis in axes]
    causes += ["zero=3"] if trainer.reducer.level == 3 else []
    if not causes:
        model.register_load_state_dict_post_hook(lambda *_: _refresh(trainer))
        return
    cause = f"with {', '.join(causes)}, this rank has parts of the model"

    def refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        raise UsageError(
            f"state_dict: {cause}, which would be written as if they were whole: take pc.save, or "
            "dcp.save(pc.state_dict(model), ...), or pc.whole_weights(model) on all ranks"
        )

    def refuse_load(*_: Any) -> None:
        raise UsageError(
            f"load_state_dict: {cause}: pc.load_state_dict(model, state) takes them from a whole "
            "state dict"
        )

    model.register_state_dict_pre_hook(refuse_state)
    model.register_load_state_dict_pre_hook(refuse_load)


def _refresh(trainer: Trainer) -> None:
    """Brings the optimizer's copies up to date with the parameters."""
    with torch.no_grad():
        for piece in trainer.reducer.pieces.values():
            parameter = piece.slot.parameter
            if piece.value is not parameter:
                flat = parameter.reshape(-1)[piece.start : piece.start + piece.value.numel()]
                piece.value.copy_(flat.view_as(piece.value))


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that belong to the model's state."""
    skipped = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in skipped]


def _frozen(trainer: Trainer) -> list[str]:
    return [name for name in trainer.placements if name not in trainer.reducer.names]


__all__ = ["Parts", "guard", "load_state_dict", "persistent_buffers", "state_dict"]
