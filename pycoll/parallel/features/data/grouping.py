"""Which parameters share a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from pycoll.parallel.core.ledger import AxisGroup


def in_buckets(
    named: list[tuple[str, nn.Parameter]], bucket_bytes: int
) -> list[list[tuple[str, nn.Parameter]]]:
    """Groups parameters, each group of one dtype, in the order in which backward reaches them.

    Args:
        named: The parameters, in the order of the model.
        bucket_bytes: Largest size of a group; a larger parameter has a group of its own.

    Returns:
        The groups, the last parameters first.
    """
    groups: list[list[tuple[str, nn.Parameter]]] = []
    last: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}  # norms may have another dtype
    held: dict[torch.dtype, int] = {}
    for name, parameter in reversed(named):
        nbytes, dtype = parameter.numel() * parameter.element_size(), parameter.dtype
        if dtype not in last or held[dtype] + nbytes > bucket_bytes:
            last[dtype], held[dtype] = [], 0
            groups.append(last[dtype])
        last[dtype].append((name, parameter))
        held[dtype] += nbytes
    return groups


def in_axis_groups(
    named: list[tuple[str, nn.Parameter]],
    group_of: Callable[[nn.Parameter], AxisGroup],
    level: int,
    groups: list[set[str]],
    bucket_bytes: int,
) -> Iterator[tuple[AxisGroup, list[tuple[str, nn.Parameter]]]]:
    """The parameters of each bucket, and the ranks that share it; arguments as in `Reducer`."""
    by_axis: dict[str, list[tuple[str, nn.Parameter]]] = {}
    of_axis: dict[str, AxisGroup] = {}
    for name, parameter in named:
        group = group_of(parameter)
        of_axis[group.axis] = group
        by_axis.setdefault(group.axis, []).append((name, parameter))
    for axis, members in by_axis.items():
        for names in groups:
            inside = [(name, parameter) for name, parameter in members if name in names]
            for bucket in in_buckets(inside, 1 << 62 if level == 3 else bucket_bytes):
                yield of_axis[axis], bucket


__all__ = ["in_axis_groups", "in_buckets"]
