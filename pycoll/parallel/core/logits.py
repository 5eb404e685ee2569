"""Logits of which each rank has a range of the classes: how they are marked and made whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycoll.parallel.core import collectives
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.specs import replace

MARK = "_pycoll_classes"  # attribute of logits that are a part: (start, stop), size, group


def mark(logits: Tensor, classes: tuple[int, int], size: int, group: AxisGroup) -> Tensor:
    """Marks logits with their range of the `size` classes."""
    setattr(logits, MARK, (classes, size, group))
    return logits


def cast(output: Any, dtype: torch.dtype) -> Any:
    """Converts the floating tensors in `output`; parts stay marked."""

    def convert(x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.dtype == dtype:
            return x
        return mark(x.to(dtype), *getattr(x, MARK)) if hasattr(x, MARK) else x.to(dtype)

    if isinstance(output, dict):  # such as the outputs of transformers, which keep their class
        for key, value in output.items():
            output[key] = cast(value, dtype)
        return output
    return replace(output, Tensor, convert)


def whole(output: Any) -> Any:
    """Gathers the logits in `output` if they are a part; returns anything else unchanged."""
    if isinstance(output, dict):  # such as the outputs of transformers
        for key, value in output.items():
            if isinstance(value, Tensor) and hasattr(value, MARK):
                output[key] = whole(value)
        return output
    if type(output) in (tuple, list):
        return type(output)(whole(part) for part in output)
    if not hasattr(output, MARK):
        return output
    _, size, group = getattr(output, MARK)
    return collectives.gather_from(output, group, -1, size)


__all__ = ["MARK", "cast", "mark", "whole"]
