"""Annotations: which dimensions of a few tensors the axis tp shares out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import as_call, to_floating
from pycoll.parallel.core.patterns import names_matching
from pycoll.parallel.core.specs import Spec
from pycoll.parallel.features.annotate.cuts import Cut, Shape
from pycoll.parallel.features.annotate.graph import Graph, Value, trace
from pycoll.parallel.features.annotate.propagate import Sharded, propagate
from pycoll.parallel.features.annotate.sharding import Sharding, describe

AXIS = "tp"
Dims = Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Annotations:
    """Shardings of some tensors of a model; see `annotate`.

    Attributes:
        placements: Dimensions by patterns of names.
        sample: A batch as for `model.step`.
    """

    placements: Mapping[str, Dims]
    sample: Any = field(default_factory=lambda: torch.zeros(2, 8, dtype=torch.int64))

    def plan(self, model: nn.Module, ranks: int) -> Sharding:
        """Finds how `ranks` ranks share a model, without changing it.

        Args:
            model: The whole model, before `parallelize`; it may be on the device "meta".
            ranks: Size of the axis tp.

        Returns:
            The parameters that are shared out, and the collectives of a step with the sample;
            `print` shows them as a table.

        Raises:
            UsageError: A pattern matches nothing, a dimension does not divide, or the model cannot
                be traced.

        Cost: one forward pass without arithmetic.
        """
        args, kwargs = self.call_of(model)
        graph, _ = trace(model, model.forward, specs_of(model), args, kwargs)
        return describe(self.shard(model, graph, ranks), AXIS)

    def call_of(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's call with the sample."""
        return as_call(to_floating(self.sample, model))

    def shard(
        self,
        model: nn.Module,
        graph: Graph,
        ranks: int,
        parameters: Mapping[str, Cut | None] | None = None,
    ) -> Sharded:
        """The sharded graph.

        Args:
            model: The model.
            graph: Its trace.
            ranks: Number of ranks.
            parameters: Cuts of parameters that are fixed already, by name.
        """
        annotated = self._match(model, graph, ranks)
        for value, name in graph.states.items():
            if parameters is not None and name in parameters:
                annotated[value] = parameters[name]
        return propagate(graph, annotated, ranks)

    def _match(self, model: nn.Module, graph: Graph, ranks: int) -> dict[Value, Cut | None]:
        states = {name: value for value, name in graph.states.items()}
        tensors = {
            **{name: values for name, values in graph.layers.items()},
            **{name: [value] for name, value in states.items()},
        }
        found: dict[Value, Cut | None] = {}
        for patterns, dims in self.placements.items():
            what = f"parameter and no layer of {type(model).__name__}"
            for name in names_matching(patterns, tensors, "annotate", what):
                for value in tensors[name]:
                    shape = tuple(graph.fakes[value].shape)
                    found[value] = _cut(name, dims, shape, ranks, exact=name in states)
        return found


def annotate(placements: Mapping[str, Dims], x: Any = None) -> Annotations:
    """Says how a few tensors of a model are shared out; the rest follows from its operators.

    A key is a pattern, as in fnmatch with `|` between alternatives, of full names of parameters or
    of layers; that of a layer stands for its output. A value has "tp" in place of the dimension
    that the axis tp shares out, and None in place of the others; "tp:3" shares out each of 3 equal
    blocks of it, as of queries, keys and values. A parameter has all its dimensions, in torch's
    order; those of an output are its last ones.

    Args:
        placements: Dimensions by pattern, such as `{"*.up": (None, "tp")}`. All None: the tensor
            stays whole.
        x: A batch as for `model.step`, of which only shapes and dtypes matter; None: two sequences
            of 8 token numbers.

    Returns:
        Annotations for `parallelize(..., annotate=)`. `plan(model, ranks)` says what they lead to.

    Raises:
        UsageError: A value is not of this form.

    Source: Xu et al., GSPMD, arXiv:2105.04663.
    """
    for pattern, dims in placements.items():
        _parse(pattern, dims)
    return Annotations(dict(placements)) if x is None else Annotations(dict(placements), x)


def specs_of(model: nn.Module) -> dict[str, Spec]:
    """Shapes of parameters and buffers by name."""
    return {n: Spec.of(x) for n, x in [*model.named_parameters(), *model.named_buffers()]}


def _parse(name: str, dims: Dims) -> tuple[int, int] | None:
    """The place of the dimension that is shared out, and its number of blocks."""
    found = []
    for i, text in enumerate(dims):
        axis, _, blocks = (text or "").partition(":")
        if text is not None and (axis != AXIS or not (blocks or "1").isdigit()):
            raise UsageError(
                f"annotate: {name!r} has {text!r}, expected None, {AXIS!r}, or such as '{AXIS}:3' "
                "for 3 blocks; parallelize shares out over the other axes by itself"
            )
        if text is not None:
            found.append((i, int(blocks or 1)))
    if len(found) > 1:
        raise UsageError(f"annotate: {name!r} has {AXIS!r} twice: one dimension can be shared out")
    return found[0] if found else None


def _cut(name: str, dims: Dims, shape: Shape, ranks: int, *, exact: bool) -> Cut | None:
    if len(dims) > len(shape) or (exact and len(dims) != len(shape)):
        raise UsageError(
            f"annotate: {name!r} has shape {shape}, and the annotation {tuple(dims)} has "
            f"{len(dims)} dimensions"
        )
    found = _parse(name, dims)
    if found is None:
        return None
    cut = Cut(found[0] + len(shape) - len(dims), found[1])
    if not cut.divides(shape, ranks):
        raise UsageError(
            f"annotate: dimension {cut.dim} of {name!r} with shape {shape} does not divide into "
            f"{cut.blocks} blocks for {AXIS}={ranks} ranks: choose another dimension or size"
        )
    return cut


__all__ = ["AXIS", "Annotations", "annotate", "specs_of"]
