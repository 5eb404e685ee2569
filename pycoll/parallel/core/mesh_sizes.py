"""The axes of a mesh and their sizes, as texts and as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pycoll.errors import UsageError

AXES = ("pp", "dp", "ep", "cp", "tp")  # slowest first


def parse_sizes(text: str) -> dict[str, int]:
    """Reads "dp=2,tp=2,pp=2".

    Raises:
        UsageError: The text does not have this form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.strip().lstrip("-").isdigit():
            raise UsageError(
                f"mesh {text!r}: {part!r} is not an axis and its size, expected for example "
                "'dp=2,tp=2,pp=2'"
            )
        sizes[axis] = int(size)
    return sizes


def infer_sizes(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Replaces -1 by the number of ranks left over.

    Raises:
        UsageError: The sizes do not multiply to `num_ranks`.
    """
    several = {axis: size for axis, size in sizes.items() if size != 1} or {"dp": 1}
    text = " x ".join(f"{axis}={size}" for axis, size in several.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    product = math.prod(size for size in sizes.values() if size != -1)
    if len(open_axes) > 1 or product < 1 or any(size < -1 for size in sizes.values()):
        raise UsageError(f"mesh {text}: expected sizes of 1 or more, at most one of them -1")
    if open_axes:
        if num_ranks % product:
            raise UsageError(
                f"mesh {text}: the other sizes multiply to {product}, which does not divide the "
                f"{num_ranks} ranks of this job"
            )
        return {**sizes, open_axes[0]: num_ranks // product}
    if product != num_ranks:
        raise UsageError(
            f"mesh {text}: multiplies to {product}, but this job has {num_ranks} ranks: start "
            f"{product} ranks, or give one axis the size -1"
        )
    return dict(sizes)


__all__ = ["AXES", "infer_sizes", "parse_sizes"]
