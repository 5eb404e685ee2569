"""Finds the plan of tensor parallelism of a model by following its activations.

Linear layers whose input is whole may be shared out by columns. If their outputs meet only
operations that work on each column, or each head, by itself, and then one linear layer, this one
is shared out by rows: the pairs of Megatron-LM. Everything else stays whole.
Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import as_call
from pycoll.parallel.core.meta_model import on_meta
from pycoll.parallel.core.specs import hidden_of, replace, tensors_in
from pycoll.parallel.features.tensor.heads import counts_of, is_linear
from pycoll.parallel.features.tensor.plan import Column, Style

Plan = dict[str, str | Style]

# fmt: off
# Functions that treat each element by itself.
_ELEMENTWISE = {
    "add", "sub", "rsub", "mul", "rmul", "div", "truediv", "neg", "pow", "rpow", "exp", "square",
    "sqrt", "rsqrt", "tanh", "sigmoid", "gelu", "silu", "relu", "softplus", "dropout", "where",
    "masked_fill", "clamp", "float", "to", "type_as", "clone", "contiguous", "detach", "half",
    "bfloat16",
}
# Functions that are right for each head by itself, once a view has made heads of columns.
_OF_HEADS = {
    "matmul", "bmm", "baddbmm", "softmax", "scaled_dot_product_attention", "cat", "stack",
    "getitem", "chunk", "split", "unbind", "repeat_interleave", "narrow",
}
_VIEWS = {
    "view", "reshape", "unflatten", "flatten", "transpose", "permute", "expand", "repeat",
    "unsqueeze", "squeeze", "movedim", "mT", "T", "swapaxes", "view_as",
}
# Functions that take the shape, dtype or device of a tensor, and not its values.
_NEW = {
    "new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like",
    "zeros_like", "size", "dim", "numel",
}
# fmt: on


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a tensor holds of layers that may be shared out by columns."""

    layers: frozenset[str]
    in_heads: bool = False  # a view has made heads of the columns
    is_output: bool = False  # the unchanged output of one layer


@dataclass(slots=True)
class _Found:
    """What a trace has seen of the layers, by full name.

    Attributes:
        row_of: The layers that take the columns of a layer.
        whole: Layers whose outputs must stay whole.
        parts: Number of equal parts into which an output is cut.
        inside: Norms of heads, and the columns that pass through them.
        regions: Modules that return what a row layer returns, for the input of column layers.
        head: The layer whose output is the model's.
    """

    row_of: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    parts: dict[str, int] = field(default_factory=dict)
    inside: dict[str, frozenset[str]] = field(default_factory=dict)
    regions: set[str] = field(default_factory=set)
    head: str | None = None


class _Follow(TorchFunctionMode):
    """Passes on, from the inputs of each function to its outputs, what they hold."""

    def __init__(self, found: _Found, heads: Mapping[str, bool]) -> None:
        super().__init__()
        self.found = found
        self.opaque = 0  # depth of layers whose functions do not matter
        self._heads = heads  # whether the module around a layer knows its heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [*tensors_in(result)]
        if self.opaque or not outputs:
            return result
        inputs = [*tensors_in([args, kwargs])]
        held = [columns for x in inputs if (columns := columns_of(x)) is not None]
        hidden = any(is_hidden(x) for x in inputs)
        name = getattr(func, "__name__", "").strip("_")
        if not held or name in _NEW:
            for y in outputs:
                mark(y, None, hidden=hidden and name not in _NEW)
            return result
        layers = frozenset().union(*(columns.layers for columns in held))
        in_heads = all(columns.in_heads for columns in held)
        if hidden or not self._keeps(name, args, inputs[0], outputs, held[0], in_heads):
            self.found.whole |= layers
        if name in _VIEWS and outputs[0].shape[-1] != inputs[0].shape[-1]:
            in_heads = True
        for y in outputs:
            mark(y, _Columns(layers, in_heads))
        return result

    def _keeps(
        self, name: str, args: Any, x: Tensor, outputs: list[Tensor], held: _Columns, in_heads: bool
    ) -> bool:
        """Whether a function treats columns, or heads, by themselves."""
        if name in _ELEMENTWISE:
            return True
        if name in _VIEWS:
            if in_heads or outputs[0].shape[-1] == x.shape[-1]:
                return True
            (layer,) = held.layers if len(held.layers) == 1 else ("",)
            if (
                held.is_output
                and outputs[0].shape[-3:-2] == (3,)
                and outputs[0].dim() > x.dim() + 1
            ):
                self.found.parts[layer] = 3  # queries, keys and values, each in heads
            return self._heads.get(layer, False)
        if name in ("chunk", "split") and held.is_output:
            sizes = {y.shape[-1] for y in outputs}
            if len(sizes) > 1 or sizes == {x.shape[-1]}:
                return False
            (layer,) = held.layers
            self.found.parts[layer] = len(outputs)
            return True
        return name in _OF_HEADS and in_heads


def columns_of(x: Tensor) -> _Columns | None:
    """What a tensor holds of column layers."""
    return getattr(x, "_pycoll_columns", None)


def is_hidden(x: Tensor) -> bool:
    """Whether a tensor is a whole hidden state, or a weight."""
    return isinstance(x, nn.Parameter) or getattr(x, "_pycoll_hidden", False)


def mark(x: Tensor, columns: _Columns | None, *, hidden: bool = False) -> None:
    """Says what a tensor holds."""
    x._pycoll_columns = columns  # type: ignore[attr-defined]
    x._pycoll_hidden = hidden and columns is None  # type: ignore[attr-defined]


def auto_plan(model: nn.Module, x: Any = None, *, file: Any = None) -> Plan:
    """Finds the plan of a model's attention, MLPs and vocabulary, and prints it.

    Args:
        model: The model before `parallelize`; it may be on the device "meta". Its forward must not
            depend on values.
        x: A batch as for `model.step`, of which only shapes and dtypes matter; None: two sequences
            of 8 token numbers.
        file: Where the plan is printed; None: standard error.

    Returns:
        A plan for `parallelize(..., tp=)`. Layers that it does not name stay whole, which is always
        right.

    Raises:
        UsageError: The model cannot run with such a batch, or no layers can be shared out.

    Cost: one forward pass without arithmetic.
    """
    x = torch.zeros(2, 8, dtype=torch.int64) if x is None else x
    found = _trace(model, x)
    plan = _shortened(_plan(model, found), [name for name, _ in model.named_modules() if name])
    if not plan:
        raise UsageError(
            f"auto_plan: no pair of linear layers of {type(model).__name__} can be shared out: "
            "write a plan by hand"
        )
    width = max(map(len, plan))
    lines = [f"  {pattern:{width}}  {style}" for pattern, style in plan.items()]
    print(
        "\n".join([f"tp plan of {type(model).__name__}:", *lines]),
        file=sys.stderr if file is None else file,
    )
    return plan


def _trace(model: nn.Module, x: Any) -> _Found:
    found = _Found()

    def like(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        mark(made, None, hidden=made.is_floating_point())
        return made

    with FakeTensorMode(), torch.device("cpu"), torch.no_grad():
        made = on_meta(model).eval()
        args, kwargs = as_call(replace(x, Tensor, like))
        modules = dict(made.named_modules())
        heads = {name: _knows_heads(modules[name.rpartition(".")[0]]) for name in modules}
        follow = _Follow(found, heads)
        for name, module in modules.items():
            _hook(name, module, follow, modules)
        try:
            with follow:
                output = made(*args, **kwargs)
        except Exception as error:
            shapes = [tuple(one.shape) for one in tensors_in([args, kwargs])]
            raise UsageError(
                f"auto_plan: {type(model).__name__} cannot run with {shapes}: {error}: give x as "
                "for model.step"
            ) from error
        for y in tensors_in(output):
            columns = columns_of(y)
            if columns is not None and columns.is_output:
                (found.head,) = columns.layers
            if columns is not None:
                found.whole |= columns.layers
    return found


def _hook(name: str, module: nn.Module, follow: _Follow, modules: dict[str, nn.Module]) -> None:
    """Follows what enters and leaves a layer."""
    own = any(True for _ in module.parameters(recurse=False))
    linear = is_linear(module)
    opaque = own and not linear and not any(map(is_linear, module.children()))
    found = follow.found

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        module._pycoll_input = hidden_of(args, kwargs)  # type: ignore[assignment]
        follow.opaque += linear or opaque

    def after(module: nn.Module, args: Any, output: Any) -> None:
        follow.opaque -= linear or opaque
        x: Any = module._pycoll_input
        columns = None if x is None else columns_of(x)
        outputs = [*tensors_in(output)]
        if linear and columns is not None:
            for layer in columns.layers:
                found.row_of.setdefault(layer, set()).add(name)
            mark(outputs[0], None, hidden=True)
            outputs[0]._pycoll_row = set(columns.layers)  # type: ignore[attr-defined]
        elif linear:
            mark(outputs[0], _Columns(frozenset([name]), is_output=True))
        elif opaque:
            if columns is not None and columns.in_heads and _is_norm(module):
                found.inside[name] = columns.layers
            elif columns is not None:
                found.whole |= columns.layers
                columns = None
            for y in outputs:
                mark(y, columns, hidden=True)
        else:
            for layer in getattr(outputs[0] if outputs else None, "_pycoll_row", ()):
                parent = layer.rpartition(".")[0]
                if parent == name and getattr(modules[layer], "_pycoll_input", None) is x:
                    found.regions.add(name)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _knows_heads(parent: nn.Module) -> bool:
    return bool(counts_of(parent)) or isinstance(getattr(parent, "head_dim", None), int)


def _plan(model: nn.Module, found: _Found) -> Plan:
    """The styles of layers by full name."""
    modules = dict(model.named_modules())
    rows = {row for rows in found.row_of.values() for row in rows}
    groups: dict[str, set[str]] = {row: set() for row in rows}
    for layer, of in found.row_of.items():
        for row in of:
            groups[row].add(layer)
    plan: Plan = {}
    for row, layers in groups.items():
        if row in found.row_of or any(
            layer in found.whole or layer in rows or len(found.row_of[layer]) > 1
            for layer in layers
        ):
            continue
        for layer in layers:
            parts = found.parts.get(layer, 1)
            plan[layer] = {1: "col", 3: "qkv"}.get(parts, Column(parts=parts))
        plan[row] = "row"
    plan |= {name: "inside" for name, layers in found.inside.items() if layers <= plan.keys()}
    plan |= {name: "region" for name in found.regions if _has_columns(name, plan)}
    return {**plan, **_vocabulary(model, modules, found.head)}


def _has_columns(name: str, plan: Plan) -> bool:
    return any(layer.rpartition(".")[0] == name for layer in plan)


def _vocabulary(model: nn.Module, modules: dict[str, nn.Module], head: str | None) -> Plan:
    """The output layer, and the embedding of as many tokens."""
    if head is None or not isinstance(modules[head], nn.Linear):
        return {}
    weight: Any = modules[head].weight
    tables = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and module.num_embeddings == len(weight)
    ]
    unfit = [
        name
        for name in tables
        for table in [modules[name]]
        if table.max_norm is not None or table.padding_idx is not None or table.sparse
    ]
    if not tables or unfit:
        return {}
    return dict.fromkeys([*tables, head], "vocab")


def _shortened(plan: Plan, names: list[str]) -> Plan:
    """The plan with a pattern for layers whose names differ in numbers only."""
    short: Plan = {}
    for name in names:
        if name not in plan:
            continue
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        same = [other for other in names if fnmatchcase(other, pattern)]
        fits = all(other in plan and plan[other] == plan[name] for other in same)
        short[pattern if fits else name] = plan[name]
    return short


__all__ = ["auto_plan"]
