"""The graph of a model's forward: calls of modules, and the functions between them.

A module is called as it is. Only the forward functions around placed modules are traced.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from pycoll.errors import UsageError
from pycoll.parallel.core.meta_model import on_meta

_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "alpha_dropout")


@dataclass(frozen=True, slots=True)
class CallGraph:
    """A traced forward.

    Attributes:
        nodes: The calls, in their order; the last one is the output.
        constants: Tensors that the forward function makes without the input, by name.
        parameters: Names of the parameters that a node uses, by node.
    """

    nodes: tuple[fx.Node, ...]
    constants: dict[str, Tensor]
    parameters: dict[fx.Node, list[str]]

    @property
    def output(self) -> fx.Node:
        """The node of the model's output."""
        return self.nodes[-1]

    @property
    def samples(self) -> list[fx.Node]:
        """The nodes of the input's tensors, in order."""
        return [node for node in self.nodes if node.op == "placeholder"]


class Tracer:
    """Traces a model's forward, once for each form of its arguments."""

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        """Copies the model without values.

        Args:
            model: The model, before it changes.
            names: The modules that are calls of the graph; those around them are not.
        """
        with torch.device("meta"):
            self._model = on_meta(model)
        self._around = {
            name.rsplit(".", cut)[0] for name in names for cut in range(1, name.count(".") + 1)
        }
        self._made: dict[tuple[bool, str], CallGraph] = {}

    def first(self, training: bool) -> CallGraph:
        """The graph of a call with a tensor for each argument that has no default."""
        parameters = inspect.signature(self._model.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        given = [p for p in parameters if p.kind in positional and p.default is p.empty]
        x = torch.empty(0)
        return self.trace((x,) * (len(given) or 1), {}, training)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> CallGraph:
        """The graph of a call.

        Args:
            args: Positional arguments; of tensors only their places matter.
            kwargs: Arguments by keyword, likewise.
            training: Whether the model trains.

        Raises:
            UsageError: The forward depends on values, or draws random numbers between modules.

        Cost: one run of the forward functions around placed modules; nothing the next time.
        """
        leaves, form = _pytree.tree_flatten((args, kwargs))
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = training, f"{form} {plain}"
        if key not in self._made:
            self._made[key] = self._trace(leaves, form, training)
        return self._made[key]

    def _trace(self, leaves: list[Any], form: Any, training: bool) -> CallGraph:
        model = self._model.train(training)
        before = set(vars(model))
        try:
            graph = _Fx(self._around, leaves, form).trace(model)
        except Exception as error:
            raise UsageError(
                f"place: the forward of {type(model).__name__} cannot be traced: "
                f"{_first_line(error)}{_where(error)}: around placed modules it must not depend on "
                "values; put such code into a module of its own"
            ) from error
        constants = {n: x for n, x in vars(model).items() if n not in before}
        first_names = {id(p): name for name, p in model.named_parameters()}
        parameters = {}
        for node in graph.nodes:
            _refuse(node, model)
            found = _uses(node, model)
            parameters[node] = list(dict.fromkeys(first_names[id(p)] for p in found))
        return CallGraph(tuple(graph.nodes), constants, parameters)


class _Fx(fx.Tracer):
    """A tracer of torch whose placeholders are the tensors of the arguments."""

    def __init__(self, around: Collection[str], leaves: list[Any], form: Any) -> None:
        super().__init__()
        self._around, self._leaves, self._form = around, leaves, form

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._around

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> Any:
        given = [
            self.create_proxy("placeholder", f"x{i}", (), {}) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(self._leaves)
        ]
        args, kwargs = _pytree.tree_unflatten(given, self._form)
        return (lambda root: root_fn(root, *args, **kwargs)), [self.root]


def _uses(node: fx.Node, model: nn.Module) -> list[nn.Parameter]:
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    return [found] if isinstance(found := attribute(node, model), nn.Parameter) else []


def attribute(node: fx.Node, model: nn.Module) -> Any:
    """The parameter or buffer that a node reads; None: it reads none."""
    if node.op != "get_attr":
        return None
    holder, _, name = str(node.target).rpartition(".")
    module = model.get_submodule(holder)
    return module._parameters.get(name, module._buffers.get(name))


def _refuse(node: fx.Node, model: nn.Module) -> None:
    """Refuses functions between modules that draw random numbers or write in place."""
    if node.op not in ("call_function", "call_method"):
        return
    name, of = str(getattr(node.target, "__name__", node.target)), type(model).__name__
    draws = name.startswith(_RANDOM) and node.kwargs.get("training", True)
    if draws or (name.startswith("scaled_dot_product") and node.kwargs.get("dropout_p", 0.0)):
        raise UsageError(
            f"place: the forward of {of} calls {name} between modules, where it cannot be keyed by "
            "place: use nn.Dropout, or put the call into a module of its own"
        )
    if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
        raise UsageError(
            f"place: the forward of {of} calls {name} between modules, which writes in place: use "
            f"{name.rstrip('_')}, or put the call into a module of its own"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _where(error: Exception) -> str:
    """The last line of the user's code that an error passed through."""
    ours = ("/torch/", "/pycoll/parallel/")
    frames = traceback.extract_tb(error.__traceback__)
    found = [f for f in frames if not any(each in f.filename for each in ours)]
    if not found:
        return ""
    file = found[-1].filename.rpartition("/")[2]
    return f" ({file}:{found[-1].lineno}: {found[-1].line})"


__all__ = ["CallGraph", "Tracer", "attribute"]
