"""A small dataset of tests that read samples by number."""

from __future__ import annotations

import torch
from torch import Tensor


class Points:
    """48 points of three classes, in float64."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(i)
        return torch.randn(5, generator=random, dtype=torch.float64), torch.tensor(i % 3)
