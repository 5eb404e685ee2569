"""Sizes of the mesh for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pycoll.errors import UsageError
from pycoll.parallel.core.mesh_sizes import AXES

# The axis that gives way first when the others do not divide the ranks; dp takes what is left.
_FIRST_TO_SHRINK = ("cp", "ep", "pp", "tp")


def sizes_for(num_ranks: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Sizes that multiply to the number of ranks, for as many of the wanted sizes as possible.

    dp takes what the other axes leave. If they do not divide the ranks, sizes shrink to their
    divisors, cp first, then ep, pp and tp.

    Args:
        num_ranks: Number of ranks.
        wanted: Size by axis; a missing axis is 1, and that of dp is not looked at.

    Raises:
        UsageError: There is no such axis, or a size is less than 1.
    """
    for axis, size in wanted.items():
        if axis not in AXES or (size < 1 and axis != "dp"):
            raise UsageError(
                f"elastic: mesh has {axis}={size}, expected sizes of 1 or more for some of "
                f"{', '.join(AXES)}; dp takes the ranks that are left"
            )
    sizes = {axis: wanted.get(axis, 1) for axis in AXES if axis != "dp"}
    for axis in _FIRST_TO_SHRINK:
        others = math.prod(size for name, size in sizes.items() if name != axis)
        fitting = [d for d in _divisors(sizes[axis]) if num_ranks % (others * d) == 0]
        if fitting:
            sizes[axis] = fitting[-1]
            break
        sizes[axis] = 1
    return {axis: sizes.get(axis, num_ranks // math.prod(sizes.values())) for axis in AXES}


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


__all__ = ["sizes_for"]
