"""Runs a sharded graph: each rank its parts, with the collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from pycoll.errors import UsageError
from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.logits import mark
from pycoll.parallel.core.placement import share
from pycoll.parallel.features.annotate.conversions import Conversion, gather
from pycoll.parallel.features.annotate.cuts import local_shape
from pycoll.parallel.features.annotate.graph import Value, value_of
from pycoll.parallel.features.annotate.operators import VIEWS
from pycoll.parallel.features.annotate.propagate import Sharded, Step


def run(
    sharded: Sharded, group: AxisGroup, states: Mapping[str, Tensor], samples: Sequence[Tensor]
) -> list[Any]:
    """Runs the forward pass on this rank; autograd records its backward.

    Args:
        sharded: The graph.
        group: The ranks.
        states: This rank's parts of parameters and buffers, by name.
        samples: The tensors of the input, whole.

    Returns:
        The outputs. Parts along the last dimension are marked as logits; all others are whole.
    """
    graph = sharded.graph
    held: dict[Value, Any] = {value: states[name] for value, name in graph.states.items()}
    held.update(zip(graph.samples, samples, strict=True))
    converted: dict[tuple[Value, Conversion], Tensor] = {}
    steps = {step.operator.node: step for step in sharded.steps}
    last = _last_uses(graph.fx)
    for node in graph.fx.nodes:
        if (step := steps.get(node)) is not None:
            result = _run(step, sharded.ranks, group, held, converted)
            for i, x in enumerate(result if isinstance(result, (list, tuple)) else [result]):
                held[node.name, i] = x
        for value in last.get(node, ()):
            held.pop(value, None)
            for key in [key for key in converted if key[0] == value]:
                del converted[key]
    (outputs,) = next(node for node in graph.fx.nodes if node.op == "output").args
    return [_result(sharded, group, held, of) for of in outputs]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[Value]]:
    """The tensors that are not needed behind each node."""
    last: dict[Value, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes if node.target is not getitem else ():
            last[value_of(used)] = node
    found: dict[fx.Node, list[Value]] = {}
    for value, node in last.items():
        if node.op != "output":
            found.setdefault(node, []).append(value)
    return found


def _result(sharded: Sharded, group: AxisGroup, held: Mapping[Value, Any], of: Any) -> Any:
    if not isinstance(of, fx.Node):
        return of
    value = value_of(of)
    x, cut = held[value], sharded.cuts.get(value)
    if cut is None:
        return x
    shape = sharded.graph.fakes[value].shape
    if sharded.is_logits(value, cut):
        return mark(x, share(shape[-1], group.size, group.rank), shape[-1], group)
    return gather(x, group, cut)


def _run(
    step: Step,
    ranks: int,
    group: AxisGroup,
    held: Mapping[Value, Any],
    converted: dict[tuple[Value, Conversion], Tensor],
) -> Any:
    operator, way = step.operator, step.way
    left = iter(step.inputs)

    def argument(node: fx.Node) -> Any:
        value, made = value_of(node), next(left)
        if made is None:
            return held[value]
        key = value, made
        if key not in converted:
            converted[key] = made.apply(held[value], group)
        return converted[key]

    mapped: Any = fx.map_arg((operator.node.args, operator.node.kwargs), argument)
    target: Any = operator.node.target
    args, kwargs = mapped
    if way is None:
        return target(*args, **kwargs)
    if operator.name in VIEWS or operator.name == "expand":
        shape = local_shape(operator.outputs[0], way.outputs[0], ranks)
        return args[0].expand(shape) if operator.name == "expand" else args[0].reshape(shape)
    if not way.summed:
        return target(*args, **kwargs)
    special = _SUMS.get(operator.name)
    x, add = (target(*args, **kwargs), None) if special is None else special(args, kwargs, group)
    if step.output is None:
        x = collectives.reduce_from(x, group)
    else:
        x = collectives.reduce_scatter_from(x, group, step.output.dim)
    return x if add is None else x + add


def _linear(args: Any, kwargs: Any, group: AxisGroup) -> tuple[Tensor, Tensor | None]:
    x, weight, bias = (*args, None)[:3]
    return functional.linear(x, weight), bias


def _conv2d(args: Any, kwargs: Any, group: AxisGroup) -> tuple[Tensor, Tensor | None]:
    x, weight, bias = (*args, None)[:3]
    y = torch.ops.aten.conv2d.default(x, weight, None, *args[3:], **kwargs)
    return y, None if bias is None else bias.view(-1, 1, 1)


def _embedding(args: Any, kwargs: Any, group: AxisGroup) -> tuple[Tensor, None]:
    table, ids, *_ = args
    start = group.rank * len(table)
    here = (ids >= start) & (ids < start + len(table))
    return functional.embedding(torch.where(here, ids - start, 0), table) * here.unsqueeze(-1), None


# Operators whose partial sums are not what the operator computes of parts: the sum, and what is
# added to it.
_SUMS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "linear": _linear,
    "conv2d": _conv2d,
    "embedding": _embedding,
}


def check_pure(sharded: Sharded) -> None:
    """Refuses a graph that writes into tensors which ranks share.

    Raises:
        UsageError: An operator writes in place into a part, or into an argument of another.
    """
    for step in sharded.steps:
        schema = getattr(step.operator.node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        is_state = step.operator.inputs[:1] and step.operator.inputs[0] in sharded.graph.states
        if not (is_state and step.way is None):
            raise UsageError(
                f"annotate: the forward writes in place ({step.operator.node.target}): use the "
                "form that returns a new tensor, such as relu(inplace=False)"
            )


__all__ = ["check_pure", "run"]
