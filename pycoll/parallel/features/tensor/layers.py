"""Tensor parallelism on a plain module: each layer keeps its part, in place.

Parameters keep their identity and their names and get shorter; the layers' forward functions add
the collectives of the plan's styles. Sizes need not divide: shares differ by one.
Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pycoll.errors import UsageError
from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.logits import mark
from pycoll.parallel.core.placement import Placement, share
from pycoll.parallel.features.tensor.conv2d import share_conv
from pycoll.parallel.features.tensor.heads import Heads
from pycoll.parallel.features.tensor.packed_experts import share_experts
from pycoll.parallel.features.tensor.plan import (
    Column,
    Conv,
    Inside,
    Packed,
    Region,
    Row,
    Style,
    Vocab,
)
from pycoll.parallel.features.tensor.shared import Shared
from pycoll.parallel.features.tensor.vocab import embed


def share_layers(
    model: nn.Module,
    styles: dict[str, Style],
    heads: Heads,
    group: AxisGroup,
    sequence: bool,
    blocks: str | None,
) -> Shared:
    """Shares the layers of a model out over `group`, in place.

    Args:
        model: The whole plain module.
        styles: Styles by layer name, from `match`.
        heads: The modules whose heads are divided.
        group: The ranks.
        sequence: Share out the activations between the layers of `blocks`, along dimension 1.
        blocks: Name of the list of blocks; needed for `sequence`.

    Returns:
        The result of sharing.

    Raises:
        UsageError: A layer does not support its style.
    """
    shared = Shared(group, sequence and group.size > 1, whole_heads=heads.whole)
    if group.size == 1:
        return shared
    modules = dict(model.named_modules())
    for name, style in styles.items():
        parent = modules[name.rpartition(".")[0]]
        _share(shared, name, modules[name], style, parent, heads)
    for name, module in modules.items():
        if name not in styles and any(id(p) in shared.placements for p in _own(module)):
            raise UsageError(
                f"tp plan: layer {name!r} is tied to one that the plan shares out: name both, "
                "such as 'embed|head'"
            )
    if shared.sequence:
        _share_sequence(shared, model, blocks)
    return shared


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _share(
    shared: Shared, name: str, layer: nn.Module, style: Style, parent: nn.Module, heads: Heads
) -> None:
    where = f"tp plan: layer {name!r} ({type(layer).__name__})"
    if isinstance(style, Inside):
        shared.inside[name] = style.dim
        shared.partial.update(id(p) for p in layer.parameters())
        return
    if isinstance(style, Region):
        if shared.sequence:
            layer.register_forward_pre_hook(partial(_enter_region, shared), with_kwargs=True)
        return
    if isinstance(style, Conv):
        share_conv(shared, where, layer, style)
        return
    if isinstance(style, Packed):
        share_experts(shared, where, layer)
        return
    if isinstance(style, Vocab) and isinstance(layer, nn.Embedding):
        _share_embedding(shared, layer)
        return
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or isinstance(layer, nn.Embedding):
        raise UsageError(f"{where} cannot be {style}: expected a linear layer")
    out_dim = 1 if type(layer).__name__ == "Conv1D" else 0  # of transformers, transposed
    if isinstance(style, Row):
        shared.shorten(weight, 1 - out_dim)
        if shared.sequence and isinstance(bias := layer.bias, nn.Parameter):
            shared.partial.add(id(bias))
        layer.forward = partial(_row, shared, layer, out_dim)  # type: ignore[method-assign]
        return
    parts, unit, gather = 1, 1, False
    if isinstance(style, Column):
        parts, gather = style.parts, style.gather
        around, size = name.rpartition(".")[0], weight.shape[out_dim] // parts
        unit = style.unit or heads.unit(where, size, around, parent, shared.group.size)
    if weight.shape[out_dim] % (parts * unit):
        raise UsageError(
            f"{where}: {weight.shape[out_dim]} outputs are not {parts} blocks of units of {unit}"
        )
    shared.shorten(weight, out_dim, parts, unit)
    placement = shared.placements[id(weight)]
    size = placement.shape[out_dim]
    if isinstance(bias := layer.bias, nn.Parameter):
        shared.shorten(bias, 0, parts, unit)
    for attribute in ("out_features", "nf"):
        if hasattr(layer, attribute):
            setattr(layer, attribute, weight.shape[out_dim])
    if isinstance(style, Vocab):
        run: Callable[..., Tensor] = partial(_classes, shared, layer.forward, placement)
    else:
        run = partial(_column, shared, layer.forward, size if gather else None)
    layer.forward = run  # type: ignore[method-assign]


def _enter_region(shared: Shared, layer: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
    return _with_input(args, kwargs, shared.enter)


def _with_input(args: tuple[Any, ...], kwargs: dict[str, Any], function: Any) -> Any:
    """Replaces the input in a block's arguments; transformers passes it by keyword."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}


def _column(shared: Shared, forward: Callable[..., Tensor], size: int | None, x: Tensor) -> Tensor:
    y = forward(shared.enter(x))
    return y if size is None else collectives.gather_from(y, shared.group, -1, size)


def _row(shared: Shared, layer: Any, out_dim: int, x: Tensor) -> Tensor:
    weight = layer.weight if out_dim == 0 else layer.weight.t()
    y = shared.leave(functional.linear(x, weight))
    return y if layer.bias is None else y + layer.bias


def _classes(
    shared: Shared, forward: Callable[..., Tensor], placement: Placement, x: Tensor
) -> Tensor:
    y = forward(collectives.copy_to(x, shared.group))
    return mark(y, placement.ranges[0], placement.shape[placement.dim or 0], shared.group)


def _share_embedding(shared: Shared, layer: nn.Embedding) -> None:
    if layer.max_norm is not None or layer.padding_idx is not None or layer.sparse:
        raise UsageError(
            "tp plan: an embedding with max_norm, padding_idx or sparse gradients cannot be vocab"
        )
    size = layer.num_embeddings
    shared.shorten(layer.weight, 0)
    layer.num_embeddings = layer.weight.shape[0]
    start, _ = share(size, shared.group.size, shared.group.rank)
    layer.forward = partial(embed, layer, start, shared.group)  # type: ignore[method-assign]


def _share_sequence(shared: Shared, model: nn.Module, blocks: str | None) -> None:
    """Shares out the sequence before the first block and gathers it after the last."""
    if blocks is None:
        raise UsageError(
            "sequence_parallel: needs the name of the list of blocks, for example pp='blocks'"
        )
    layers = list(model.get_submodule(blocks).children())
    group = shared.group

    def part(x: Tensor) -> Tensor:
        if x.shape[1] % group.size:
            raise UsageError(
                f"sequence_parallel: a sequence of {x.shape[1]} does not divide among "
                f"tp={group.size} ranks: pad it"
            )
        return collectives.scatter_to(x, group, 1)

    def scatter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_input(args, kwargs, part)

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        x = output if isinstance(output, Tensor) else output[0]
        x = collectives.gather_from(x, group, 1, x.shape[1] * group.size)
        return x if isinstance(output, Tensor) else (x, *output[1:])

    layers[0].register_forward_pre_hook(scatter, with_kwargs=True)
    layers[-1].register_forward_hook(gather)
    for layer in layers:
        for parameter in layer.parameters():
            if id(parameter) not in shared.placements:
                shared.partial.add(id(parameter))
        for name, module in model.named_modules():
            if module is layer:
                for inner, _ in layer.named_modules():
                    shared.inside.setdefault(f"{name}.{inner}" if inner else name, 1)


__all__ = ["share_layers"]
