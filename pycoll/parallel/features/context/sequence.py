"""The sequence of a batch; each rank of the axis cp has a share of it from the first block on.

Modules before the blocks run on the whole sequence, so positions are right. Their gradients are
partial sums, like those of all later modules: for gradients, ranks of cp act like replicas.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pycoll.errors import UsageError
from pycoll.parallel.core import specs
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.losses import Loss
from pycoll.parallel.core.placement import Placement, Ranges, share, within
from pycoll.parallel.core.positions import Positions


class Sequence:
    """Which share of the sequence each rank has.

    Rank r of c has the parts r and 2c - 1 - r of 2c equal parts: under a causal mask, where later
    tokens attend to more keys, all ranks have the same amount of work.

    Attributes:
        group: The ranks of cp.
        attended: Number of times attention went around the ring.
    """

    def __init__(
        self, group: AxisGroup, positions: Positions, tensor: AxisGroup | None = None
    ) -> None:
        """See `parallelize`.

        Args:
            group: The ranks of cp.
            positions: Records the length of the sequence.
            tensor: The ranks that divide each share further, with sequence_parallel.
        """
        self.group, self.attended = group, 0
        self._positions, self._tensor = positions, tensor
        self._before = 0  # value of `attended` at the start of the running block

    @property
    def length(self) -> int:
        """Length of the whole sequence while this rank's share of it passes; else 0."""
        return self._positions.now.sequence

    def ranges(self, length: int, rank: int | None = None) -> Ranges:
        """The places of a rank's share in a sequence of `length`; None: this rank's share.

        Raises:
            UsageError: The length does not divide.
        """
        rank, size = self.group.rank if rank is None else rank, self.group.size
        part, rest = divmod(length, 2 * size)
        if rest or not part:
            raise UsageError(
                f"cp: a sequence of {length} does not divide into {2 * size} parts, two for each "
                f"of cp={size} ranks: pad it"
            )
        last = 2 * size - 1 - rank
        return (rank * part, (rank + 1) * part), (last * part, (last + 1) * part)

    def found_in(self, shape: tuple[int, ...]) -> tuple[int, Ranges] | None:
        """The dimension along which a tensor is a share, and the ranges; None: it is not a share.

        Raises:
            UsageError: Several dimensions could be the sequence.
        """
        if not self.length:
            return None
        ranges = self.ranges(self.length)
        shares = {self.length // self.group.size: ranges}
        if self._tensor is not None:
            size = self.length // self.group.size
            own = share(size, self._tensor.size, self._tensor.rank)
            shares[own[1] - own[0]] = within(ranges, *own)
        inner = range(1, max(min(2, len(shape)), len(shape) - 1))
        dims = [dim for dim in inner if shape[dim] in shares]
        if len(dims) > 1:
            raise UsageError(
                f"cp: cannot tell which dimension of {shape} is the sequence, with "
                f"{shape[dims[0]]} places on this rank: choose another length, or number of heads"
            )
        return (dims[0], shares[shape[dims[0]]]) if dims else None

    def take(self, x: Tensor) -> Tensor:
        """This rank's share of a tensor with the whole sequence along dimension 1."""
        return Placement(tuple(x.shape), 1, self.ranges(x.shape[1])).take(x)

    def whole(self, output: Any) -> Any:
        """Gathers the shares of the sequence in a model's output; gradients flow back to them."""
        length = self.length
        if self.group.size == 1 or not length:
            return output

        def gather(x: Tensor) -> Tensor:
            is_share = x.dim() > 1 and x.shape[1] * self.group.size == length
            return _Gather.apply(x, self) if is_share else x

        if isinstance(output, dict):  # such as the outputs of transformers: keeps its class
            for key, value in output.items():
                output[key] = specs.replace(value, Tensor, gather)
            return output
        return specs.replace(output, Tensor, gather)

    def of_shares(self, loss: Loss) -> Loss:
        """Returns a loss of this rank's share: it cuts the targets like the sequence."""

        def of_share(output: Any, target: Any) -> Any:
            length, found = self.length, []

            def look(x: Tensor) -> Tensor:
                found.append(x.dim() > 1 and x.shape[1] == length)
                return self.take(x) if found[-1] else x

            made = first_tensor(output)
            if made is None or made.dim() < 2 or made.shape[1] * self.group.size != length:
                raise UsageError(
                    f"cp: the model returns {_shape(made)}, expected a sequence, "
                    f"{length // self.group.size} long on each rank: what follows the blocks must "
                    "treat each token by itself"
                )
            target = specs.replace(target, Tensor, look)
            if found and not any(found):
                raise UsageError(
                    f"cp: no target has the {length} tokens of the sequence in dimension 1, so "
                    "none can be shared out: what follows the blocks must treat each token by "
                    "itself"
                )
            return loss(output, target)

        return of_share if self.group.size > 1 else loss

    def cut(self, model: nn.Module, blocks: str | None, *, staged: bool) -> None:
        """Makes a model cut its sequences at its first block, in place.

        Args:
            model: The model with the blocks.
            blocks: Name of the list of blocks.
            staged: Whether the first blocks may be on another pipeline stage.

        Raises:
            UsageError: The list does not exist, or a layer works along the sequence.
        """
        if self.group.size == 1:
            return
        if blocks is None:
            raise UsageError(
                f"cp={self.group.size} needs the name of the list of blocks: the sequence is cut "
                "at the first block, for example pp='blocks'"
            )
        for name, module in model.get_submodule(blocks).named_modules(prefix=blocks):
            wide = isinstance(module, _ConvNd) and max(module.kernel_size) > 1
            if isinstance(module, nn.RNNBase) or wide:
                raise UsageError(
                    f"cp: layer {name!r} ({type(module).__name__}) works along the sequence, of "
                    "which each rank has a share: only attention reaches the other shares"
                )
        model.register_forward_pre_hook(lambda *_: self._positions.move(sequence=0))
        for i, (child, block) in enumerate(model.get_submodule(blocks).named_children()):
            name = f"{blocks}.{child}" if blocks else child
            enter = partial(self._enter, name, i == 0 or not staged)
            block.register_forward_pre_hook(enter, with_kwargs=True)
            block.register_forward_hook(partial(self._leave, name))

    def _enter(
        self, name: str, whole: bool, block: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Cuts the hidden state, with the sequence along dimension 1, at the first block.

        Its companions, such as the rotary embedding of each place, reach every block whole.
        """
        hidden = specs.hidden_of(args, kwargs)
        if hidden is None or hidden.dim() < 3:
            raise UsageError(
                f"cp: block {name!r} gets {_shape(hidden)}, expected a tensor of samples, places "
                "in the sequence, and features"
            )
        times = self.group.size * (1 if self._tensor is None else self._tensor.size)
        if not self.length:
            length = hidden.shape[1] * (1 if whole else times)
            self.ranges(length)  # raises if the length does not divide
            self._positions.move(sequence=length)
        elif hidden.shape[1] * times != self.length:
            raise UsageError(
                f"cp: block {name!r} gets {hidden.shape[1]} places of the sequence, expected "
                f"{self.length // times}: its length may not change between blocks"
            )
        length = self.length

        def part(x: Tensor) -> Tensor:
            # A mask of all tokens by all tokens stays whole: attention selects its rows.
            is_mask = x.shape == (length, length) and (
                x.is_floating_point() or x.dtype == torch.bool
            )
            cuts = x.dim() > 1 and x.shape[1] == length and not is_mask
            return self.take(x) if cuts else x

        self._before = self.attended
        return specs.replace((args, kwargs), Tensor, part)

    def _leave(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        if self.attended == self._before:
            raise UsageError(
                f"cp: block {name!r} calls no torch.nn.functional.scaled_dot_product_attention, so "
                "its tokens would not see those of the other ranks: call it, or take cp=1"
            )


class _Gather(torch.autograd.Function):
    """Every rank has the same gradient of the whole, of which each takes that of its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: Sequence) -> Tensor:
        ctx.sequence = sequence
        group, first = sequence.group, x.transpose(0, 1)  # the sequence comes first
        shares = group.all_gather(first, [x.numel()] * group.size).view(group.size, *first.shape)
        whole = x.new_empty((group.size * x.shape[1], *first.shape[1:]))
        for rank, held in enumerate(shares):
            ranges = sequence.ranges(len(whole), rank)
            Placement(tuple(whole.shape), 0, ranges).put(held, whole)
        return whole.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.sequence.take(grad), None


def first_tensor(output: Any) -> Tensor | None:
    """The first floating tensor in a layer's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, dict) else output
    if not isinstance(output, (dict, tuple, list)):
        return None
    return next((t for value in values if (t := first_tensor(value)) is not None), None)


def _shape(x: Tensor | None) -> str:
    return "no tensor" if x is None else f"a tensor of shape {tuple(x.shape)}"


__all__ = ["Sequence", "first_tensor"]
