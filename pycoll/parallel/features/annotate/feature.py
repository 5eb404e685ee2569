"""Annotated models: tp shares out what a few annotated tensors lead to."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

from pycoll.errors import UsageError
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.specs import Spec
from pycoll.parallel.features.annotate.annotations import AXIS, Annotations, specs_of
from pycoll.parallel.features.annotate.graph import trace
from pycoll.parallel.features.annotate.propagate import Sharded
from pycoll.parallel.features.annotate.run import check_pure, run
from pycoll.parallel.features.feature import Build, Feature
from pycoll.parallel.features.tensor.feature import TensorParallel


class Annotated(Feature):
    """Shares out parameters, and runs the sharded graph in place of the model's forward."""

    after = (TensorParallel,)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        annotations, group = build.options.annotate, build.grid.line(AXIS)
        self._forward: ShardedForward | None = None
        if annotations is None:
            return
        if not isinstance(annotations, Annotations):
            raise UsageError(
                f"parallelize: annotate is a {type(annotations).__name__}, expected the result of "
                "pc.annotate"
            )
        self._refuse()
        if group.size > 1:
            self._forward = ShardedForward(build.model, annotations, group)

    def _refuse(self) -> None:
        """Refuses what changes or replaces the layers, which the graph does not call."""
        options, grid = self.build.options, self.build.grid
        norms = any(isinstance(module, _BatchNorm) for module in self.build.model.modules())
        found = {
            "a tp plan": options.tp,
            "sequence_parallel": options.sequence_parallel,
            "recompute": options.recompute,
            "precision": options.precision,
            "zero=3": options.zero == 3,
            "batch normalization with dp > 1": norms and grid.size("dp") > 1,
            **{f"{axis} > 1": grid.size(axis) > 1 for axis in ("pp", "cp", "ep")},
        }
        for name, asked in found.items():
            if asked:
                raise UsageError(f"parallelize: annotate does not go with {name}: leave one out")

    def apply(self) -> None:
        if self._forward is None:
            return
        model, shared = self.build.model, self.build[TensorParallel].shared
        parameters = dict(model.named_parameters())
        sharded = self._forward.first
        for value, name in sharded.graph.states.items():
            if name in parameters and (cut := sharded.cuts.get(value)) is not None:
                shared.shorten(parameters[name], cut.dim, cut.blocks)
            elif value in sharded.partial:
                shared.partial.add(id(parameters[name]))
        model.forward = self._forward  # type: ignore[method-assign]


class ShardedForward:
    """A model's forward as sharded graphs: one for each shape of its input.

    Attributes:
        first: The graph of the annotations' sample.
    """

    def __init__(self, model: nn.Module, annotations: Annotations, group: AxisGroup) -> None:
        self._model, self._annotations, self._group = model, annotations, group
        self._plain = model.forward
        self._specs = specs_of(model)
        self._made: dict[Any, tuple[Sharded, Any]] = {}
        args, kwargs = annotations.call_of(model)
        self._fixed: dict[str, Any] | None = None
        self.first = self._of(args, kwargs)[0]
        self._fixed = {
            name: self.first.cuts.get(value) for value, name in self.first.graph.states.items()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharded, form = self._of(args, kwargs)
        model = self._model
        states = dict([*model.named_parameters(), *model.named_buffers()])
        samples = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = run(sharded, self._group, states, samples)
        return _pytree.tree_unflatten(outputs, form)

    def _of(self, args: Any, kwargs: Any) -> tuple[Sharded, Any]:
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        described = tuple(Spec.of(x) if isinstance(x, Tensor) else x for x in leaves)
        key = self._model.training, str(structure), repr(described)
        if key not in self._made:
            graph, form = trace(self._model, self._plain, self._specs, args, kwargs)
            sharded = self._annotations.shard(self._model, graph, self._group.size, self._fixed)
            check_pure(sharded)
            if self._fixed is not None and _partial(sharded) != _partial(self.first):
                names = sorted(_partial(sharded) ^ _partial(self.first))
                raise UsageError(
                    f"annotate: an input of {described} is shared in another way than the sample, "
                    f"so the gradients of {', '.join(names[:3])} are other sums: give pc.annotate "
                    "a sample of this shape"
                )
            self._made[key] = sharded, form
        return self._made[key]


def _partial(sharded: Sharded) -> set[str]:
    return {sharded.graph.states[value] for value in sharded.partial}


__all__ = ["Annotated", "ShardedForward"]
