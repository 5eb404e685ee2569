"""The whole tensors behind the pieces that this rank's optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.core.structures import dtype_name, dtype_of
from pycoll.parallel.features.data.reducer import Piece
from pycoll.parallel.optim.tensors import Found
from pycoll.parallel.trainer.trainer import Trainer


class Pieces:
    """`Tensors` of ranks with pieces, by sums over all ranks; each element counts once.

    Other ranks have other parameters, and all take part in the sums of each.
    """

    def __init__(self, trainer: Trainer, groups: list[list[str]]) -> None:
        """Learns which tensors there are. Collective.

        Args:
            trainer: The trainer.
            groups: Names of this rank's parameters in each group of the optimizer.
        """
        self._world = trainer.mesh.line(*trainer.mesh.sizes)
        self._device = trainer.mesh.device
        pieces = trainer.reducer.pieces
        self._pieces = {id(piece.value): piece for piece in pieces.values()}
        mine = {
            name: [i, list(pieces[name].placement.shape), dtype_name(pieces[name].value.dtype)]
            for i, names in enumerate(groups)
            for name in names
            if name in pieces
        }
        self._known: dict[str, list[Any]] = {}
        for of_rank in gather_objects(mine, self._world.comm):
            self._known |= {name: known for name, known in of_rank.items()}
        self._places = {name: place for place, name in enumerate(self._known)}

    def _of(self, parameter: Tensor) -> Piece:
        return self._pieces[id(parameter)]

    def shape(self, parameter: Tensor) -> torch.Size:
        """See Tensors."""
        return torch.Size(self._of(parameter).placement.shape)

    def spread(self, parameter: Tensor, values: Tensor) -> Tensor:
        """See Tensors."""
        piece = self._of(parameter)
        whole = values.new_zeros(piece.placement.shape)
        if piece.owned:
            local = values.new_zeros(piece.local_shape)
            local.view(-1)[piece.start : piece.start + values.numel()] = values.reshape(-1)
            piece.placement.put(local, whole)
        return whole

    def cut(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """See Tensors."""
        return self._of(parameter).cut(whole).view_as(parameter)

    def sums(self, parameters: list[Tensor], rows: Tensor) -> Tensor:
        """See Tensors.

        Cost: an all_reduce of a float64 for each number in a row, and for each parameter of any
            rank.
        """
        pieces = [self._of(parameter) for parameter in parameters]
        places = [self._places[piece.name] for piece in pieces]
        owned = torch.tensor([piece.owned for piece in pieces], dtype=torch.bool)
        whole = torch.zeros(len(self._places), rows.shape[1], dtype=torch.float64)
        whole[places] = rows.cpu() * owned.unsqueeze(-1)
        return self._sum(whole)[places]

    def add_up(self, parameters: list[Tensor], vectors: list[Tensor]) -> list[Tensor]:
        """See Tensors.

        Cost: an all_reduce of a float64 for each row and column of each matrix of any rank.
        """
        mine = {self._of(p).name: vector for p, vector in zip(parameters, vectors, strict=True)}
        parts: dict[str, Tensor] = {}
        for name, (_, shape, _) in self._known.items():
            numel = torch.Size(shape).numel()
            length = numel // shape[-1] + numel // shape[-2] if len(shape) > 1 else 0
            part = torch.zeros(length, dtype=torch.float64, device=self._device)
            parts[name] = part + mine[name] if name in mine else part
        whole = self._sum(torch.cat([*parts.values()])) if parts else torch.zeros(0)
        ends = whole.split([len(part) for part in parts.values()])
        sums = dict(zip(parts, ends, strict=True))
        return [sums[name].to(vector.dtype) for name, vector in mine.items()]

    def on_whole(
        self, groups: Collection[int], found: Found, function: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """See Tensors.

        Cost: a reduce and a broadcast of each whole tensor over all ranks.
        """
        mine = {self._of(parameter).name: (parameter, value) for _, parameter, value in found}
        names = [name for name, (i, _, _) in self._known.items() if i in groups]
        made: dict[str, Tensor] = {}
        for at, name in enumerate(names):
            _, shape, dtype = self._known[name]
            if name in mine:
                whole = self.spread(*mine[name])
            else:
                whole = torch.zeros(shape, dtype=dtype_of(dtype), device=self._device)
            owner = at % self._world.size
            self._world.reduce(whole, owner)
            if self._world.rank == owner:
                made[name] = whole
        made = {name: function(self._known[name][0], whole) for name, whole in made.items()}
        results = {}
        for at, name in enumerate(names):
            _, shape, dtype = self._known[name]
            if name in made:
                whole = made.pop(name).contiguous()
            else:
                whole = torch.empty(shape, dtype=dtype_of(dtype), device=self._device)
            self._world.broadcast(whole, at % self._world.size)
            if name in mine:
                results[name] = self.cut(mine[name][0], whole).clone()
        return [results[name] for name in mine]

    def _sum(self, x: Tensor) -> Tensor:
        return x if self._world.size == 1 else self._world.all_reduce(x)


def is_of_elements(value: Any, piece: Tensor) -> bool:
    """Whether a state has a number for each element of a piece."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == piece.shape


__all__ = ["Pieces", "is_of_elements"]
