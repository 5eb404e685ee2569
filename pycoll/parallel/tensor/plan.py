"""Plans of tensor parallelism: which layer is shared out how, by patterns of names.

{"*.qkv": "qkv", "*.out": "row", "*.up": "col", "*.down": "row", "embed|head": "vocab"}
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from pycoll.errors import UsageError


@dataclass(frozen=True, slots=True)
class Column:
    """A layer whose outputs are shared out; its result is a part, its input whole.

    Attributes:
        parts: Of how many equal blocks its outputs consist, each of which is shared out by itself:
            3 for queries, keys and values in one layer.
        unit: Outputs that stay together, such as the size of a head; None: the attribute
            `head_dim` of the module around it, or what its attribute for the number of heads
            leaves, or 1.
        gather: Put the result together again, so that it is whole.
    """

    parts: int = 1
    unit: int | None = None
    gather: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A layer whose inputs are shared out; ranks' partial sums are added up to a whole result."""


@dataclass(frozen=True, slots=True)
class Vocab:
    """An embedding whose rows, or an output layer whose classes, are shared out."""


@dataclass(frozen=True, slots=True)
class Inside:
    """A layer that meets parts: dropout on them, or a norm of each head.

    Attributes:
        dim: Of its input that is shared out.
    """

    dim: int = -1


@dataclass(frozen=True, slots=True)
class Region:
    """A module, such as attention or an MLP, whose input is made whole where it begins.

    Only where what lies between the layers is shared out along the sequence, and only for modules
    that look at the shape of their input: else the layers within do it.
    """


@dataclass(frozen=True, slots=True)
class Conv:
    """A Conv2d as parts of one operator.

    Attributes:
        by: "out" (its channels of output are shared out, and put together again), "in" (its
            channels of input, whose partial sums are added up), or "space" (rows of the image,
            with an exchange of the rows at the borders; input and output are parts).
    """

    by: str


Style = Column | Row | Vocab | Inside | Region | Conv

_STYLES: dict[str, Style] = {
    "col": Column(),
    "qkv": Column(parts=3),
    "gather": Column(gather=True),
    "row": Row(),
    "vocab": Vocab(),
    "inside": Inside(),
    "inside:1": Inside(1),
    "region": Region(),
    "conv_out": Conv("out"),
    "conv_in": Conv("in"),
    "conv_space": Conv("space"),
}


def match(model: nn.Module, plan: Mapping[str, str | Style]) -> dict[str, Style]:
    """The style of each layer that a plan names.

    Args:
        model: Whose layers.
        plan: Styles, or their names, by patterns of layers' full names as of fnmatch, with `|`
            between alternatives. Of several patterns that match, the last one counts.

    Returns:
        By full name, in the order of the model.

    Raises:
        UsageError: No such style, or a pattern that matches no layer; names near ones.
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
        for pattern in patterns.split("|"):
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise UsageError(
                    f"tp plan: {pattern!r} matches no layer of {type(model).__name__}; near names "
                    f"are {', '.join(_near(pattern, names)) or 'none'}"
                )
            found.update(dict.fromkeys(matched, style))
    return {name: found[name] for name in names if name in found}


def _near(pattern: str, names: list[str]) -> list[str]:
    """Names whose last part is like the pattern's, then those that are like it as a whole."""
    lasts: dict[str, str] = {}
    for name in names:
        lasts.setdefault(name.rpartition(".")[2], name)
    last = pattern.rpartition(".")[2]
    near = [lasts[key] for key in difflib.get_close_matches(last, lasts, n=4, cutoff=0.4)]
    near += difflib.get_close_matches(pattern, names, n=4, cutoff=0.4)
    return list(dict.fromkeys(near))[:4]


__all__ = ["Column", "Conv", "Inside", "Region", "Row", "Style", "Vocab", "match"]
