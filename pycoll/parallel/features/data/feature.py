"""Data parallelism: dp shares a batch out, and adds gradients up."""

from __future__ import annotations

from torch import nn

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.features.feature import Feature


class DataParallel(Feature):
    """Replicas with distinct samples."""

    def sums_over(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("dp",)

    def splits_tokens(self) -> tuple[str, ...]:
        return ("dp",)

    def owns(self, name: str, parameter: nn.Parameter, along: AxisGroup) -> bool:
        """The ranks share many parameters out among themselves; ZeRO gives each a piece of all."""
        return self.build.options.zero > 0 or along.rank == self.build.numbers[name] % along.size


__all__ = ["DataParallel"]
