"""The numbers of heads of the modules around shared layers: which are divided, and by how much.

A module's numbers of heads are divided if the plan shares out the layers whose outputs become its
heads. This is clear where the plan shares out all linear layers of the module, or its queries, keys
and values in one layer. Otherwise one forward pass on fake tensors shows which outputs a view cuts
into heads; what it does not show is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from pycoll.errors import UsageError
from pycoll.parallel.core.meta_model import on_meta
from pycoll.parallel.core.specs import tensors_in
from pycoll.parallel.features.tensor.plan import Column, Style

# Attribute names of the number of heads, and attributes derived from it.
HEADS = (
    *("heads", "n_heads", "num_heads", "n_head", "num_attention_heads"),
    *("kv_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads"),
)
_WIDTHS = ("split_size",)

_NO_VALUES = {"size", "dim", "numel"}


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; Conv1D of transformers is one."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def counts_of(module: nn.Module) -> dict[str, int]:
    """The numbers of heads of a module, by attribute."""
    return {name: n for name in HEADS if isinstance(n := getattr(module, name, None), int)}


class Heads:
    """The modules whose heads a plan divides.

    Attributes:
        whole: Names of modules whose numbers of heads stay.
    """

    def __init__(self, model: nn.Module, styles: Mapping[str, Style]) -> None:
        """Decides for each module with column layers; changes nothing.

        Raises:
            UsageError: It cannot be seen whether a module's heads are divided, or shared heads meet
                the output of a layer that stays whole.
        """
        self._seen: dict[int, tuple[dict[str, int], int]] = {}
        self.whole: set[str] = set()
        modules = dict(model.named_modules())
        unclear: list[_Unclear] = []
        for parent in dict.fromkeys(n.rpartition(".")[0] for n in styles):
            asked = {n: s for n in _below(parent, styles) if isinstance(s := styles[n], Column)}
            columns = [n for n in asked if n.rpartition(".")[0] == parent]
            if not columns or not counts_of(modules[parent]):
                continue
            said = {asked[n].heads for n in columns}
            open_ = [n for n in columns if asked[n].heads is None and asked[n].unit is None]
            linear = [n for n in _below(parent, modules) if is_linear(modules[n])]
            left = [n for n in linear if n not in styles]
            if True in said or any(asked[n].parts == 3 for n in open_):
                continue
            if not open_:
                self.whole.add(parent)
            elif left:
                unclear.append(_Unclear(parent, modules[parent], open_, left))
        if unclear:
            self.whole |= _seen_whole(model, unclear)

    def unit(self, where: str, size: int, name: str, parent: nn.Module, num_ranks: int) -> int:
        """The outputs of one head, which stay together; sets the module's numbers for this rank.

        Args:
            where: Start of an error's text.
            size: Outputs of the layer, or of each of its parts.
            name: Name of the module around the layer.
            parent: This module.
            num_ranks: The ranks that share the heads.

        Raises:
            UsageError: A number of heads does not divide among the ranks.
        """
        if name in self.whole:
            return 1
        if id(parent) not in self._seen:
            counts, width = counts_of(parent), getattr(parent, "head_dim", None)
            self._seen[id(parent)] = counts, width if isinstance(width, int) else 0
            for attribute, count in counts.items():
                if count % num_ranks:
                    raise UsageError(
                        f"{where}: its {attribute} = {count} does not divide among tp={num_ranks} "
                        "ranks: choose a tp that divides it"
                    )
                setattr(parent, attribute, count // num_ranks)
            for attribute in _WIDTHS:
                if hasattr(parent, attribute):
                    setattr(parent, attribute, getattr(parent, attribute) // num_ranks)
        counts, unit = self._seen[id(parent)]
        if not unit and counts:
            unit = size // next(iter(counts.values()))
        if not unit or size % unit:
            return 1
        if not counts and (size // unit) % num_ranks:
            raise UsageError(
                f"{where}: its {size // unit} heads do not divide among tp={num_ranks} ranks: "
                "choose a tp that divides them"
            )
        return unit


def _below(parent: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if not parent or name.startswith(f"{parent}.")]


class _Unclear:
    """A module with heads of which the plan shares out some linear layers only.

    Attributes:
        name: Its full name.
        shared: Full names of its column layers, which may make heads.
        left: Full names of the linear layers within it that stay whole.
        kind: What modules of the same kind have in common.
    """

    def __init__(self, name: str, module: nn.Module, shared: list[str], left: list[str]) -> None:
        self.name, self.shared, self.left = name, shared, left
        start = len(name) + 1 if name else 0
        self.kind = type(module), *(tuple(n[start:] for n in names) for names in (shared, left))
        self.title = f"{name!r} ({type(module).__name__}, {_text(counts_of(module))})"


def _text(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} = {n}" for name, n in counts.items())


class _Follow(TorchFunctionMode):
    """Notes which layers' outputs a view cuts into heads, and which meet in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0  # of linear layers that run
        self.in_heads: set[str] = set()
        self.done: set[str] = set()  # modules whose forward has ended
        self.met: set[frozenset[str]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        outputs, inputs = [*tensors_in(result)], [*tensors_in([args, kwargs])]
        layers = frozenset[str]().union(*map(_layers, inputs))
        if self.depth or not layers or not outputs or name in _NO_VALUES:
            return result
        self.met.add(layers)
        cut = name in ("view", "reshape", "unflatten")
        if cut and outputs[0].shape[-1] < inputs[0].shape[-1]:
            self.in_heads |= layers
        for y in outputs:
            y._pycoll_layers = layers  # type: ignore[attr-defined]
        return result


def _layers(x: Tensor) -> frozenset[str]:
    """The linear layers of which a tensor holds outputs."""
    return getattr(x, "_pycoll_layers", frozenset())


def _seen_whole(model: nn.Module, unclear: list[_Unclear]) -> set[str]:
    """The modules whose heads stay whole, by a forward pass on two sequences of 8 tokens."""
    follow, problem = _Follow(), ""
    followed = {n for one in unclear for n in (*one.shared, *one.left)}
    watched = {one.name for one in unclear}
    try:
        with FakeTensorMode(), torch.device("cpu"), torch.no_grad():
            made = on_meta(model).eval()
            for name, module in made.named_modules():
                if is_linear(module):
                    _hook(module, name if name in followed else None, follow)
                if name in watched:
                    module.register_forward_hook(lambda *_, name=name: follow.done.add(name))
            with follow:
                made(torch.zeros(2, 8, dtype=torch.int64))
    except Exception as error:  # of the model: what has run until then counts
        problem = f" (the model cannot run with 2 sequences of 8 tokens: {error})".split("\n")[0]
    whole: set[str] = set()
    for one in unclear:
        same = [other for other in unclear if other.kind == one.kind]
        for other in same:
            for layers in follow.met:
                if (cut := layers & {*other.shared}) and (left := layers & {*other.left}):
                    raise UsageError(
                        f"tp plan: layer {min(left)!r} stays whole, but its output meets the part "
                        f"that a rank has of {min(cut)!r}, so its gradient would be a part: share "
                        "out both layers, or none"
                    )
        if any(follow.in_heads & {*other.shared} for other in same):
            continue
        if any(other.name in follow.done and follow.in_heads & {*other.left} for other in same):
            whole.add(one.name)
            continue
        raise UsageError(
            f"tp plan: {one.shared[0]!r} is shared out, {one.left[0]!r} is not, and which of them "
            f"makes the heads of {one.title} cannot be seen{problem}: give the first "
            "Column(heads=True) or Column(heads=False)"
        )
    return whole


def _hook(layer: nn.Module, name: str | None, follow: _Follow) -> None:
    def before(layer: nn.Module, args: Any) -> None:
        follow.depth += 1

    def after(layer: nn.Module, args: Any, output: Tensor) -> None:
        follow.depth -= 1
        output._pycoll_layers = frozenset(() if name is None else (name,))  # type: ignore[attr-defined]

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


__all__ = ["HEADS", "Heads", "counts_of", "is_linear"]
