"""Dropout by place: every mesh drops the same elements."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from pycoll.parallel.features.context.feature import ContextParallel
from pycoll.parallel.features.dropout.dropout import key_dropouts
from pycoll.parallel.features.dropout.functional_dropout import install
from pycoll.parallel.features.feature import Feature
from pycoll.parallel.features.tensor.feature import TensorParallel


class KeyedDropout(Feature):
    """Keys masks by place; attention, which drops too, sees the sequence of cp."""

    after = (ContextParallel, TensorParallel)

    def apply(self) -> None:
        build, shared = self.build, self.build[TensorParallel].shared
        group = build.grid.line("tp")
        inside = {} if group.size == 1 else shared.inside
        sequence = build[ContextParallel].sequence
        key_dropouts(build.model, build.positions, inside, group, sequence)
        self._install()

    def apply_meta(self) -> None:
        for module in self.build.model.modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                module.forward = partial(_drop, module)  # type: ignore[method-assign]
        if self.build[ContextParallel].sequence.group.size > 1:
            self._install()

    def _install(self) -> None:
        tensor = self.build[TensorParallel]
        sequence = self.build[ContextParallel].sequence
        install(self.build.model, self.build.positions, tensor.shared, tensor.styles, sequence)


def _drop(module: nn.Dropout, x: Tensor) -> Tensor:
    """Saves what keyed dropout saves: a mask in the dtype of its input."""
    return x * torch.empty_like(x) / 0.5 if module.training else x


__all__ = ["KeyedDropout"]
