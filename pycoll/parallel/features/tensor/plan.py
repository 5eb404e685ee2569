"""Plans of tensor parallelism: the style in which each layer is shared out, by name patterns.

{"*.qkv": "qkv", "*.out": "row", "*.up": "col", "*.down": "row", "embed|head": "vocab"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.core.patterns import names_matching


@dataclass(frozen=True, slots=True)
class Column:
    """A layer whose outputs are shared out: it gets a whole input and returns a part.

    Attributes:
        parts: Number of equal blocks of its outputs, each of which is shared out separately: 3 for
            queries, keys and values in one layer.
        unit: Outputs that stay together, such as the size of a head; None: the attribute
            `head_dim` of the enclosing module, or the size that follows from its number of
            heads, or 1.
        heads: Whether its outputs become heads, so that the numbers of heads of the module around
            it are divided among the ranks. None: as the plan, or a forward pass without values,
            shows; if neither does, the plan is refused. A layer with a `unit` makes none.
        gather: Gather the whole result.
    """

    parts: int = 1
    unit: int | None = None
    heads: bool | None = None
    gather: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A layer whose inputs are shared out; the ranks' partial sums add up to a whole result."""


@dataclass(frozen=True, slots=True)
class Vocab:
    """An embedding with its rows shared out, or an output layer with its classes shared out."""


@dataclass(frozen=True, slots=True)
class Inside:
    """A layer whose input is a part, such as dropout, or a norm of each head.

    Attributes:
        dim: The dimension of its input that is shared out.
    """

    dim: int = -1


@dataclass(frozen=True, slots=True)
class Region:
    """A module, such as attention or an MLP, that gathers its whole input at its start.

    It is needed only with sequence_parallel, and only for modules that look at the shape of their
    input; otherwise the layers within gather it.
    """


@dataclass(frozen=True, slots=True)
class Conv:
    """A Conv2d that is shared out as one operator.

    Attributes:
        by: "out" (shares output channels and gathers the result), "in" (shares input channels and
            adds up the partial sums), or "space" (shares the image's rows and exchanges those
            at the borders; input and output are parts).
    """

    by: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A module that has the weights of all experts as two tensors, as in transformers."""


Style = Column | Row | Vocab | Inside | Region | Conv | Packed

_STYLES: dict[str, Style] = {
    "col": Column(),
    "qkv": Column(parts=3),
    "gather": Column(gather=True),
    "row": Row(),
    "vocab": Vocab(),
    "inside": Inside(),
    "inside:1": Inside(1),
    "region": Region(),
    "packed": Packed(),
    "conv_out": Conv("out"),
    "conv_in": Conv("in"),
    "conv_space": Conv("space"),
}


def match(model: nn.Module, plan: Mapping[str, str | Style]) -> dict[str, Style]:
    """Returns the style of each layer that a plan names.

    Args:
        model: The model whose layers are named.
        plan: Styles, or their names, by patterns of full layer names as in fnmatch, with `|`
            between alternatives. If several patterns match, the last one applies.

    Returns:
        Styles by full name, in the order of the model.

    Raises:
        UsageError: A style does not exist, or a pattern matches no layer; lists similar names.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, Style] = {}
    for patterns, style in plan.items():
        if isinstance(style, str):
            if style not in _STYLES:
                raise UsageError(
                    f"tp plan: {patterns!r} is {style!r}, expected one of {', '.join(_STYLES)}"
                )
            style = _STYLES[style]
        what = f"layer of {type(model).__name__}"
        found.update(dict.fromkeys(names_matching(patterns, names, "tp plan", what), style))
    return {name: found[name] for name in names if name in found}


__all__ = ["Column", "Conv", "Inside", "Packed", "Region", "Row", "Style", "Vocab", "match"]
