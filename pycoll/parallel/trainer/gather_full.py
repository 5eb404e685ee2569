"""Assembles whole tensors from the pieces that ranks hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.features.data.reducer import Piece
from pycoll.parallel.trainer.owner import trainer_of
from pycoll.parallel.trainer.trainer import Trainer


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters of a parallelized model, whole, on every rank. Collective.

    Args:
        model: A model that `parallelize` returned.

    Returns:
        Tensors by full name, in the order of stages and model; other ranks' experts come last.

    Cost: an all_reduce of each parameter over all ranks; meant for tests and small models.
    """
    trainer = trainer_of(model)
    return put_together(
        trainer, {name: (piece, piece.value) for name, piece in trainer.reducer.pieces.items()}
    )


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Like `whole_weights`, for the gradients between `model.step` and the optimizer's step."""
    trainer = trainer_of(model)
    pieces = trainer.reducer.pieces.items()
    return put_together(
        trainer,
        {name: (piece, piece.value.grad) for name, piece in pieces if piece.value.grad is not None},
    )


def put_together(trainer: Trainer, flat: dict[str, tuple[Piece, Tensor]]) -> dict[str, Tensor]:
    """Assembles whole tensors from flat values of pieces; each element has one owner."""
    world = trainer.mesh.line(*trainer.mesh.sizes)
    mine = {
        name: (list(piece.placement.shape), str(values.dtype).removeprefix("torch."))
        for name, (piece, values) in flat.items()
    }
    shapes = {name: shape for of in gather_objects(mine, world.comm) for name, shape in of.items()}
    result: dict[str, Tensor] = {}
    for name, (shape, dtype) in shapes.items():
        device = trainer.mesh.device
        result[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        if name in flat and flat[name][0].owned:
            piece, values = flat[name]
            local = torch.zeros(piece.local_shape, dtype=values.dtype, device=device)
            local.view(-1)[piece.start : piece.start + values.numel()] = values.detach().view(-1)
            piece.placement.put(local, result[name])
        world.all_reduce(result[name])
    return result


__all__ = ["put_together", "whole_gradients", "whole_weights"]
