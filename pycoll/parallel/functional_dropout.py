"""Dropout that a model calls as a function: masks by place, as those of nn.Dropout.

While a module of the user's runs, calls of `torch.nn.functional.dropout` and of attention that
drops are taken over. A mask's stream is named after the module and after how many came before in
its call; so a layer that is computed again drops the same elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pycoll.errors import UsageError
from pycoll.parallel.dropout import Positions, WholeSize, drop
from pycoll.parallel.ledger import Line
from pycoll.parallel.tensor.layers import HEADS, Shared
from pycoll.parallel.tensor.plan import Column, Row, Style

_REFUSED = (functional.alpha_dropout, functional.feature_alpha_dropout)


@dataclass(slots=True)
class Around:
    """What a module has around layers that tp shares out.

    Attributes:
        heads: Numbers of heads on this rank.
        parts: Sizes of the last dimension of parts.
        wholes: The same of what is whole again.
    """

    heads: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    wholes: set[int] = field(default_factory=set)


class FunctionalDropout(TorchFunctionMode):
    """Takes over what drops, in modules whose forward functions it has wrapped."""

    def __init__(
        self, positions: Positions, inside: Mapping[str, int], around: dict[str, Around], line: Line
    ) -> None:
        super().__init__()
        self._positions, self._inside, self._around = positions, inside, around
        self._line = line
        self._running: list[list[Any]] = []  # modules: their names, and how often each has dropped
        self._on = False
        self._sizes: dict[int | None, WholeSize] = {}
        self._taken: dict[Any, Callable[..., Any]] = {
            functional.dropout: self._dropout,
            functional.scaled_dot_product_attention: self._attention,
            functional.multi_head_attention_forward: self._multi_head,
            **dict.fromkeys(
                (functional.dropout1d, functional.dropout2d, functional.dropout3d), self._channels
            ),
            **{function: partial(self._refuse, function) for function in _REFUSED},
        }

    def wrap(self, name: str, module: nn.Module) -> None:
        """Lets a module's forward function run within this mode, in place."""
        module.forward = partial(self._run, name, module.forward)  # type: ignore[method-assign]

    def _run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._within(name):
            return forward(*args, **kwargs)

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self._running.append([name, 0])
        was_on, self._on = self._on, True
        try:
            if was_on:
                yield
            else:
                with self:
                    yield
        finally:
            self._on = was_on
            self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        taken = self._taken.get(func, func)
        return taken(*args, **(kwargs or {}))

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
        """Whole channels, of inputs of shape [N, C, ...]."""
        if not training or not p:
            return input
        ones = input.new_ones(input.shape[:2])
        made = input * self._drop(ones, p, None).view(*input.shape[:2], *[1] * (input.dim() - 2))
        return input.copy_(made) if inplace else made

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Without its kernel where it drops: torch's own mask could not be keyed."""
        if not dropout_p:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch._safe_softmax(scores, -1)
        name = self._running[-1][0]
        shared = self._line.size > 1 and name in self._around and query.dim() == 4
        return self._drop(weights, dropout_p, 1 if shared else None) @ value

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """Its own calls are looked up in the module of functions, past any mode."""
        names = ("dropout", "scaled_dot_product_attention")
        before = {name: getattr(functional, name) for name in names}
        functional.dropout = self._dropout
        functional.scaled_dot_product_attention = self._attention_of(before[names[1]])
        try:
            return functional.multi_head_attention_forward(*args, **kwargs)
        finally:
            for name, function in before.items():
                setattr(functional, name, function)

    def _attention_of(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def attention(
            q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False
        ) -> Any:
            return (self._attention if p else plain)(q, k, v, mask, p, causal)

        return attention

    def _refuse(
        self, function: Any, input: Tensor, p: float = 0.5, training: bool = False, **rest: Any
    ) -> Tensor:
        if not training or not p:
            return input
        raise UsageError(
            f"{self._name()}: {function.__name__} cannot be keyed by place, so meshes would "
            "differ: use nn.Dropout"
        )

    def _name(self) -> str:
        return f"layer {self._running[-1][0]!r}"

    def _drop(self, x: Tensor, p: float, dim: int | None) -> Tensor:
        name, number = self._running[-1]
        self._running[-1][1] += 1
        if dim not in self._sizes:
            self._sizes[dim] = WholeSize(dim, self._line)
        return drop(x, p, f"{name}/{number}", self._positions, self._sizes[dim])

    def _dim(self, x: Tensor) -> int | None:
        """Along which dimension tp shares a tensor out, within the module that runs."""
        name = self._running[-1][0]
        around = self._around.get(name)
        if self._line.size == 1 or around is None:
            return self._inside.get(name)
        if x.dim() == 4 and x.shape[1] in around.heads:
            return 1
        if x.shape[-1] in around.parts & around.wholes:
            raise UsageError(
                f"{self._name()}: whether functional dropout meets a part of its "
                f"{x.shape[-1]} elements or all of them cannot be told: use nn.Dropout"
            )
        return -1 if x.shape[-1] in around.parts else self._inside.get(name)


def key_functions(
    model: nn.Module, positions: Positions, shared: Shared, styles: Mapping[str, Style]
) -> None:
    """Makes functional dropout of a model draw masks by place, in place.

    Args:
        model: Whose modules.
        positions: Where they look.
        shared: What tensor parallelism has made of the model.
        styles: Of its layers, by name.

    Raises:
        UsageError: A layer drops within a kernel of torch's, such as nn.LSTM.
    """
    around: dict[str, Around] = {}
    modules = dict(model.named_modules())
    for name, style in styles.items() if shared.line.size > 1 else ():
        placement = shared.placements.get(id(getattr(modules[name], "weight", None)))
        if placement is None or placement.dim is None:
            continue
        parent = name.rpartition(".")[0]
        of = around.setdefault(parent, Around())
        of.heads.update(
            n for key in HEADS if isinstance(n := getattr(modules[parent], key, 0), int)
        )
        if isinstance(style, Column) and not style.gather:
            of.parts.add(placement.local_shape[placement.dim])
        elif isinstance(style, Row):
            of.wholes.add(placement.shape[1 - placement.dim])
    inside = {} if shared.line.size == 1 else shared.inside
    mode = FunctionalDropout(positions, inside, around, shared.line)
    for name, module in modules.items():
        if isinstance(module, nn.RNNBase) and module.dropout:
            raise UsageError(
                f"layer {name!r}: the dropout within {type(module).__name__} cannot be keyed by "
                "place, so meshes would differ: set it to 0 and put nn.Dropout between layers"
            )
        kinds = (nn.MultiheadAttention, nn.modules.dropout._DropoutNd)
        own = not type(module).__module__.startswith("torch.nn.")
        if own or (isinstance(module, kinds) and not isinstance(module, nn.Dropout)):
            mode.wrap(name, module)


__all__ = ["FunctionalDropout", "key_functions"]
