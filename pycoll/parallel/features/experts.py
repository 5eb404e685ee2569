"""Expert parallelism: ep shares the experts out, and tokens travel to the owners and back.

Source: Lepikhin et al., GShard, arXiv:2006.16668; there is no capacity, so no token is dropped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from pycoll.errors import UsageError
from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import share, share_sizes
from pycoll.parallel.features.feature import Build, Feature


class Experts(nn.ModuleList):
    """The experts of a mixture, behind its router. Each token chooses some of them.

    On one process it computes what a loop over the experts would; no mesh is needed. On a mesh
    with the axis ep, the ranks of ep share the experts out.
    """

    def __init__(self, experts: Any) -> None:
        """Takes a list of modules; each maps tokens of shape [m, d] to [m, d'], for any m."""
        super().__init__(experts)
        self._num_experts = len(self)
        self._group: AxisGroup | None = None

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of the experts' outputs for each token.

        Args:
            tokens: Shape [n, d].
            indices: The k experts of each token, int64 of shape [n, k].
            weights: Weight of each of these experts, shape [n, k].

        Returns:
            Tensor of shape [n, d'].

        Raises:
            UsageError: Shapes do not fit, or an index names no expert.

        Cost: over e ranks, one all_gather of e times the number of experts int64s, and two
            all_to_alls of n * k rows; backward adds two more.
        """
        shape = (len(tokens), *indices.shape[1:2])
        if tokens.dim() != 2 or not len(shape) == 2 or not indices.shape == weights.shape == shape:
            raise UsageError(
                f"Experts: tokens, indices and weights have the shapes {tuple(tokens.shape)}, "
                f"{tuple(indices.shape)}, {tuple(weights.shape)}, expected [n, d], [n, k], [n, k]"
            )
        asked = indices.flatten()
        # Numbers of rows are sizes of tensors and of messages, so the host needs them.
        counts = asked.bincount(minlength=self._num_experts).cpu()
        if len(counts) > self._num_experts:
            raise UsageError(
                f"Experts: a token chooses expert {len(counts) - 1}, there are {self._num_experts}"
            )
        order = asked.argsort(stable=True)  # by expert
        rows = order // indices.shape[1]
        if self._group is None:
            made = self._run(tokens[rows], counts.tolist())
        else:
            made = self._run_everywhere(tokens, rows, counts, self._group)
        made = made * weights.flatten()[order].unsqueeze(-1)
        return made.new_zeros((len(tokens), *made.shape[1:])).index_add(0, rows, made)

    def _run_everywhere(
        self, tokens: Tensor, rows: Tensor, counts: Tensor, group: AxisGroup
    ) -> Tensor:
        """Sends rows, in the order of their experts, to the owners and back."""
        if torch.is_grad_enabled() and not tokens.requires_grad:
            # Backward is collective: it must run on all ranks or on none.
            tokens = tokens.detach().requires_grad_()
        everyone = group.all_gather(counts, [len(counts)] * group.size).view(group.size, -1)
        there = [int(part.sum()) for part in counts.split(share_sizes(len(counts), group.size))]
        start, stop = share(len(counts), group.size, group.rank)
        mine = everyone[:, start:stop]  # by source and expert
        here = mine.sum(1).tolist()
        came = collectives.all_to_all(tokens[rows], group, there, here)
        experts = torch.arange(stop - start, device=tokens.device).repeat(group.size)
        repeats = mine.flatten().to(tokens.device)
        by_expert = experts.repeat_interleave(repeats, output_size=len(came)).argsort(stable=True)
        made = self._run(came[by_expert], mine.sum(0).tolist())
        return collectives.all_to_all(made[by_expert.argsort()], group, here, there)

    def _run(self, x: Tensor, counts: list[int]) -> Tensor:
        """Runs this rank's experts on consecutive groups of rows, `counts[i]` rows for expert i."""
        asked = [(expert, count) for expert, count in zip(self, counts, strict=True) if count]
        if asked:
            parts = x.split([count for _, count in asked])
            return torch.cat([expert(part) for (expert, _), part in zip(asked, parts, strict=True)])
        with torch.no_grad():
            nothing = next(iter(self))(x)  # empty; gives the width of the output
        return nothing + x.sum() * 0  # keeps the graph to `x`


@dataclass(slots=True)
class Owned:
    """Which rank has which experts.

    Attributes:
        some: Whether there are any experts.
        here: Ids of the parameters of this rank's experts, where experts are shared out.
        elsewhere: Trainable parameters of other ranks' experts: name, and prefix of their list.
    """

    some: bool
    here: set[int] = field(default_factory=set)
    elsewhere: dict[str, str] = field(default_factory=dict)


class ExpertParallel(Feature):
    """Shares the experts out over ep.

    Attributes:
        owned: Which experts are where.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.needs_barrier = build.grid.size("ep") > 1
        self.owned = Owned(False)

    def apply(self) -> None:
        self.owned = share_experts(self.build.model, self.build.grid.line("ep"))

    def apply_meta(self) -> None:
        """Tokens choose experts evenly, as there are no values."""
        self.apply()
        for experts in experts_of(self.build.model).values():
            experts.forward = partial(_route, experts)  # type: ignore[method-assign]

    def sums_over(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return () if id(parameter) in self.owned.here else ("ep",)

    def splits_tokens(self) -> tuple[str, ...]:
        return ("ep",)

    def agrees_on(self, name: str, here: Collection[str]) -> bool:
        """True for experts of other ranks, in lists of which this rank has some."""
        prefix = self.owned.elsewhere.get(name)
        return prefix is not None and any(other.startswith(prefix) for other in here)


def share_experts(model: nn.Module, group: AxisGroup) -> Owned:
    """Shares the experts of a model out over `group`, in place: a rank keeps its own.

    Args:
        model: The whole model.
        group: The ranks of ep.

    Returns:
        Which experts are where.

    Raises:
        UsageError: There are fewer experts than ranks, or none, or a layer within an expert
            depends on which tokens it gets.
    """
    found = experts_of(model)
    owned = Owned(bool(found))
    if group.size > 1 and not found:
        raise UsageError(
            f"ep={group.size}: {type(model).__name__} has no pc.Experts that could be shared out"
        )
    for name, experts in found.items():
        prefix = f"{name}." if name else ""
        _refuse(prefix, experts)
        if group.size == 1:
            continue
        if len(experts) < group.size:
            raise UsageError(
                f"ep={group.size}: layer {name!r} has {len(experts)} experts, fewer than ranks: "
                f"take ep={len(experts)} or less"
            )
        start, stop = share(len(experts), group.size, group.rank)
        for i, expert in enumerate(list(experts)):
            if start <= i < stop:
                owned.here.update(id(parameter) for parameter in expert.parameters())
                continue
            for inner, parameter in expert.named_parameters():
                if parameter.requires_grad:
                    owned.elsewhere[f"{prefix}{i}.{inner}"] = prefix
            del experts._modules[str(i)]
        experts._group = group
    return owned


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The mixtures of a model, by name."""
    return {name: of for name, of in model.named_modules() if isinstance(of, Experts)}


def _refuse(prefix: str, experts: Experts) -> None:
    """Refuses modules within experts that depend on the order of the tokens."""
    for inner, module in experts.named_modules(prefix=prefix.removesuffix(".")):
        if isinstance(module, _DropoutNd) and module.p:
            raise UsageError(
                f"layer {inner!r}: dropout within experts cannot be keyed by place, so meshes "
                "would differ: put it behind the experts"
            )


def _route(experts: Experts, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Routes tokens evenly to all experts."""
    order = indices.flatten().argsort()
    rows = order // indices.shape[1]
    parts = tokens[rows].split(share_sizes(len(rows), len(experts)))
    made = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    made = made * weights.flatten()[order].unsqueeze(-1)
    return made.new_zeros((len(tokens), *made.shape[1:])).index_add(0, rows, made)


__all__ = ["ExpertParallel", "Experts", "Owned", "experts_of", "share_experts"]
