"""The graph of a model's forward pass: operators, and the tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils import _pytree

from pycoll.errors import UsageError
from pycoll.parallel.core.specs import Spec, tensors_in
from pycoll.parallel.features.annotate.cuts import Shape

Value = tuple[str, int]  # a tensor: the name of the node that makes it, and which of its results


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of the graph.

    Attributes:
        node: The node.
        inputs: Its tensor arguments, in order; one may occur twice.
        shapes: Their whole shapes.
        outputs: The whole shapes of its results.
    """

    node: fx.Node
    inputs: tuple[Value, ...]
    shapes: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    @property
    def name(self) -> str:
        """Its name in torch, without the overload: "linear"; in-place forms count as the others."""
        packet = getattr(self.node.target, "overloadpacket", self.node.target)
        return str(getattr(packet, "__name__", packet)).rstrip("_")

    @property
    def values(self) -> tuple[Value, ...]:
        """Its arguments, then its results."""
        return (*self.inputs, *((self.node.name, i) for i in range(len(self.outputs))))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument that is no tensor, by its place or its name."""
        args = self.node.args
        return args[place] if place < len(args) else self.node.kwargs.get(name, default)


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced forward pass.

    Attributes:
        fx: The graph of torch.
        operators: Its operators, in order.
        fakes: The tensors without values, by value.
        states: Parameters and buffers by value, with their names.
        samples: The tensors of the input, in order.
        layers: The results of each layer, by its name.
        learning: Values through which gradients flow.
    """

    fx: fx.Graph
    operators: tuple[Operator, ...]
    fakes: dict[Value, Tensor]
    states: dict[Value, str]
    samples: tuple[Value, ...]
    layers: dict[str, list[Value]]
    learning: frozenset[Value]

    @property
    def results(self) -> list[Value]:
        """The tensors of the output."""
        (outputs,) = next(node for node in self.fx.nodes if node.op == "output").args
        assert isinstance(outputs, (list, tuple))
        return [value_of(of) for of in outputs if isinstance(of, fx.Node)]

    def nbytes(self, value: Value) -> int:
        """Bytes of a whole tensor."""
        return self.fakes[value].nbytes


def value_of(node: fx.Node) -> Value:
    """The tensor that a node stands for."""
    if node.target is getitem:
        source, place = node.args
        assert isinstance(source, fx.Node) and isinstance(place, int)
        return source.name, place
    return node.name, 0


def trace(
    model: nn.Module,
    forward: Callable[..., Any],
    states: Mapping[str, Spec],
    args: Any,
    kwargs: Any,
) -> tuple[Graph, Any]:
    """Traces a forward pass without values.

    Args:
        model: The module.
        forward: Its forward function.
        states: Its parameters and buffers, whole, by name.
        args: Positional arguments, of which only shapes and dtypes matter.
        kwargs: Arguments by keyword, likewise.

    Returns:
        The graph, and the structure of its outputs.

    Raises:
        UsageError: The forward pass depends on values, is random, or fails with these arguments.
    """
    leaves, form = _pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    holder = _Holder(model, forward)
    mode = FakeTensorMode()
    found: dict[str, list[str]] = {}
    forms: list[Any] = []

    def run(tensors: list[Tensor], inputs: list[Tensor]) -> list[Any]:
        given = list(leaves)
        for place, x in zip(places, inputs, strict=True):
            given[place] = x
        args, kwargs = _pytree.tree_unflatten(given, form)
        named = {f"model.{name}": x for name, x in zip(states, tensors, strict=True)}
        output = torch.func.functional_call(holder, named, args, kwargs)
        flat, out_form = _pytree.tree_flatten(output)
        forms.append(out_form)
        return flat

    hooks = [
        module.register_forward_hook(partial(_note, found, name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with mode, torch.no_grad():
            fakes = [torch.empty(s.shape, dtype=s.dtype) for s in states.values()]
            inputs = [torch.empty(leaves[i].shape, dtype=leaves[i].dtype) for i in places]
            module = make_fx(run, pre_dispatch=True)(fakes, inputs)
    except UsageError:
        raise
    except Exception as error:
        shapes = [tuple(x.shape) for x in tensors_in(leaves)]
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"annotate: {type(model).__name__} cannot be traced with {shapes}: {reason}: its "
            "forward must not depend on values; give a sample as for model.step"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return _graph(module.graph, states, len(places), found), forms[-1]


class _Holder(nn.Module):
    """Runs the forward function that a model had before it was put on a mesh."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _note(found: dict[str, list[str]], name: str, module: Any, args: Any, output: Any) -> None:
    mode = get_proxy_mode()
    for x in tensors_in(output):
        slot = None if mode is None else get_proxy_slot(x, mode.tracer, None)
        if slot is not None:
            found.setdefault(name, []).append(slot.proxy.node.name)


def _graph(
    graph: fx.Graph, states: Mapping[str, Spec], num_inputs: int, found: Mapping[str, list[str]]
) -> Graph:
    nodes = {node.name: node for node in graph.nodes}
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    named = {(node.name, 0): name for node, name in zip(holders, states, strict=False)}
    fakes: dict[Value, Tensor] = {(node.name, 0): node.meta["val"] for node in holders}
    learning = {value for value, name in named.items() if states[name].requires_grad}
    operators = []
    for node in graph.nodes:
        if node.op == "get_attr":
            raise UsageError(
                f"annotate: the forward makes a constant tensor ({node.target}): register it as a "
                "buffer of the module"
            )
        if node.op != "call_function" or node.target is getitem:
            continue
        results = [*tensors_in(node.meta.get("val"))]
        for i, x in enumerate(results):
            fakes[node.name, i] = x
        inputs: list[Value] = []
        fx.map_arg((node.args, node.kwargs), lambda n: inputs.append(value_of(n)))  # noqa: B023
        _refuse_random(node)
        if any(value in learning for value in inputs):
            learning |= {(node.name, i) for i, x in enumerate(results) if x.dtype.is_floating_point}
        operators.append(
            Operator(
                node,
                tuple(inputs),
                tuple(tuple(fakes[value].shape) for value in inputs),
                tuple(tuple(x.shape) for x in results),
            )
        )
    layers = {
        name: [value_of(nodes[node]) for node in of if node in nodes] for name, of in found.items()
    }
    samples = tuple((node.name, 0) for node in holders[len(states) : len(states) + num_inputs])
    return Graph(graph, tuple(operators), fakes, named, samples, layers, frozenset(learning))


def _refuse_random(node: fx.Node) -> None:
    target = node.target
    tags = getattr(target, "tags", ())
    drops = "dropout" in str(target) and len(node.args) == 3 and not (node.args[1] and node.args[2])
    attends = "scaled_dot_product" in str(target)
    dropped = (node.args[4:5] or (node.kwargs.get("dropout_p", 0.0),))[0] if attends else 1.0
    if torch.Tag.nondeterministic_seeded in tags and not drops and dropped:
        raise UsageError(
            f"annotate: the forward draws random numbers ({target}): set dropout to 0, or use a "
            "tp plan"
        )


__all__ = ["Graph", "Operator", "Value", "trace", "value_of"]
