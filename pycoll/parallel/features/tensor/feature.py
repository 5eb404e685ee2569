"""Tensor parallelism: tp shares the layers of a plan out."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.features.experts import ExpertParallel, experts_of
from pycoll.parallel.features.feature import Build, Feature
from pycoll.parallel.features.tensor.heads import Heads, counts_of
from pycoll.parallel.features.tensor.layers import share_layers
from pycoll.parallel.features.tensor.plan import match
from pycoll.parallel.features.tensor.shared import Shared


class TensorParallel(Feature):
    """Shares layers out.

    Attributes:
        styles: Styles of the layers on this rank, by name.
        shared: The result.
    """

    after = (ExpertParallel,)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._group = build.grid.line("tp")
        self.styles = match(build.model, build.options.tp)
        self.shared = Shared(self._group, False)
        self._heads = Heads(build.model, self.styles if self._group.size > 1 else {})
        if build.options.sequence_parallel and self._group.size > 1:
            self._refuse_within_experts()
            self._refuse_whole_attention()

    def _refuse_within_experts(self) -> None:
        lists = tuple(f"{name}." if name else "" for name in experts_of(self.build.model))
        for name in self.styles:
            if name.startswith(lists):
                raise UsageError(
                    f"layer {name!r}: with sequence_parallel, tp cannot share out what is within "
                    "experts: leave it out of the plan"
                )

    def _refuse_whole_attention(self) -> None:
        for name, module in self.build.model.named_modules():
            start = f"{name}." if name else ""
            shared = any(n.startswith(start) for n in self.styles)
            if counts_of(module) and (name in self._heads.whole or not shared):
                raise UsageError(
                    f"sequence_parallel: the heads of {name!r} ({type(module).__name__}) stay "
                    "whole, but this rank has a part of the sequence: share out the layers that "
                    "make the heads, too"
                )

    def apply(self) -> None:
        model, options = self.build.model, self.build.options
        self.styles = {n: self.styles[n] for n, _ in model.named_modules() if n in self.styles}
        self.shared = share_layers(
            model, self.styles, self._heads, self._group, options.sequence_parallel, options.pp
        )

    def sums_over(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("tp",) if id(parameter) in self._partial else ()

    def splits_tokens(self) -> tuple[str, ...]:
        # The ranks' distinct tokens may choose distinct experts.
        return ("tp",) if self.shared.sequence and self.build[ExpertParallel].owned.some else ()

    def owns(self, name: str, parameter: nn.Parameter, along: AxisGroup) -> bool:
        if id(parameter) in self.shared.placements or id(parameter) in self._partial:
            return True
        return self._group.rank == self.build.numbers[name] % self._group.size

    def placements(self) -> Mapping[int, Placement]:
        return self.shared.placements

    @property
    def _partial(self) -> set[int]:
        return self.shared.partial if self._group.size > 1 else set()


__all__ = ["TensorParallel"]
