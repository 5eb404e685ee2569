"""Dropout that a model calls as a function: masks keyed by place, like those of nn.Dropout.

The stream of a mask is named after the innermost running module and the number of earlier masks
in its call, so a layer that is computed again drops the same elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pycoll.errors import UsageError
from pycoll.parallel.core.functions import Functions
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import Ranges, share
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.features.context.attention import Attention
from pycoll.parallel.features.context.sequence import Sequence
from pycoll.parallel.features.dropout.dropout import Whole, drop
from pycoll.parallel.features.experts import Experts
from pycoll.parallel.features.tensor.heads import counts_of
from pycoll.parallel.features.tensor.plan import Column, Row, Style
from pycoll.parallel.features.tensor.shared import Shared

_REFUSED = (functional.alpha_dropout, functional.feature_alpha_dropout)


@dataclass(slots=True)
class Around:
    """The layers that tp shares out around a module.

    Attributes:
        whole_heads: Whether every rank has all heads.
        heads: Numbers of heads on this rank, where they are shared out.
        parts: Sizes of the last dimension of outputs that are parts.
        wholes: Sizes of the last dimension of outputs that are whole.
    """

    whole_heads: bool
    heads: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    wholes: set[int] = field(default_factory=set)


class FunctionalDropout:
    """Replaces the dropout functions within the modules of a model."""

    def __init__(
        self,
        functions: Functions,
        positions: Positions,
        inside: Mapping[str, int],
        around: dict[str, Around],
        group: AxisGroup,
        sequence: Sequence,
        experts: tuple[str, ...],
    ) -> None:
        self._functions, self._experts = functions, experts
        self._positions, self._inside, self._around = positions, inside, around
        self._group, self._sequence = group, sequence
        self._wholes: dict[int | None, Whole] = {}
        functions.taken |= {
            functional.dropout: self._dropout,
            **dict.fromkeys(
                (functional.dropout1d, functional.dropout2d, functional.dropout3d), self._channels
            ),
            **{function: partial(self._refuse, function) for function in _REFUSED},
        }

    def heads(self, here: int) -> tuple[int, Ranges] | None:
        """The total number of heads, and the range on this rank; None: the rank has all heads."""
        around = self._around.get(self._functions.name)
        if self._group.size == 1 or around is None or around.whole_heads:
            return None
        total = here * self._group.size
        return total, (share(total, self._group.size, self._group.rank),)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not p:
            return input
        made = self._drop(input, p, self._dim(input))
        return input.copy_(made) if inplace else made

    def _channels(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Drops whole channels of inputs of shape [N, C, ...]."""
        if not training or not p:
            return input
        ones = input.new_ones(input.shape[:2])
        made = input * self._drop(ones, p, None).view(*input.shape[:2], *[1] * (input.dim() - 2))
        return input.copy_(made) if inplace else made

    def _refuse(
        self, function: Any, input: Tensor, p: float = 0.5, training: bool = False, **rest: Any
    ) -> Tensor:
        if not training or not p:
            return input
        raise UsageError(
            f"layer {self._functions.name!r}: {function.__name__} cannot be keyed by place, so "
            "meshes would differ: use nn.Dropout"
        )

    def _drop(self, x: Tensor, p: float, dim: int | None) -> Tensor:
        if self._functions.name.startswith(self._experts):
            raise UsageError(
                f"layer {self._functions.name!r}: dropout within experts cannot be keyed by place, "
                "so meshes would differ: put it behind the experts"
            )
        if dim not in self._wholes:
            self._wholes[dim] = Whole(dim, self._group, self._sequence)
        return drop(x, p, self._functions.stream(), self._positions, self._wholes[dim])

    def _dim(self, x: Tensor) -> int | None:
        """The dimension along which tp shares a tensor out within the running module."""
        name = self._functions.name
        around = self._around.get(name)
        if self._group.size == 1 or around is None:
            return self._inside.get(name)
        if x.dim() == 4 and x.shape[1] in around.heads:
            return 1
        if x.shape[-1] in around.parts & around.wholes:
            raise UsageError(
                f"layer {name!r}: cannot tell whether functional dropout gets a part of its "
                f"{x.shape[-1]} elements or all of them: use nn.Dropout"
            )
        return -1 if x.shape[-1] in around.parts else self._inside.get(name)


def install(
    model: nn.Module,
    positions: Positions,
    shared: Shared,
    styles: Mapping[str, Style],
    sequence: Sequence,
) -> None:
    """Makes a model's functional dropout draw masks by place, and attention see the sequence.

    Args:
        model: The model whose modules change.
        positions: The positions that dropout looks up.
        shared: What tensor parallelism has made of the model.
        styles: Styles of the model's layers, by name.
        sequence: The sequence of which this rank may have a share.

    Raises:
        UsageError: A layer applies dropout within a kernel of torch, such as nn.LSTM.
    """
    around: dict[str, Around] = {}
    modules = dict(model.named_modules())
    for name, style in styles.items() if shared.group.size > 1 else ():
        placement = shared.placements.get(id(getattr(modules[name], "weight", None)))
        if placement is None or placement.dim is None:
            continue
        parent = name.rpartition(".")[0]
        of = around.setdefault(parent, Around(parent in shared.whole_heads))
        if not of.whole_heads:
            of.heads.update(counts_of(modules[parent]).values())
        if isinstance(style, Column) and not style.gather:
            of.parts.add(placement.local_shape[placement.dim])
        elif isinstance(style, Row):
            of.wholes.add(placement.shape[1 - placement.dim])
    inside = {} if shared.group.size == 1 else shared.inside
    functions = Functions()
    lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, Experts))
    dropout = FunctionalDropout(functions, positions, inside, around, shared.group, sequence, lists)
    Attention(functions, positions, sequence, dropout.heads)
    for name, module in modules.items():
        if isinstance(module, nn.RNNBase) and module.dropout:
            raise UsageError(
                f"layer {name!r}: the dropout within {type(module).__name__} cannot be keyed by "
                "place, so meshes would differ: set it to 0 and put nn.Dropout between layers"
            )
        kinds = (nn.MultiheadAttention, nn.modules.dropout._DropoutNd)
        own = not type(module).__module__.startswith("torch.nn.")
        if own or (isinstance(module, kinds) and not isinstance(module, nn.Dropout)):
            functions.wrap(name, module)


__all__ = ["FunctionalDropout", "install"]
