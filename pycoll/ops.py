"""Reduction operators that carry a value."""

from __future__ import annotations

from pycoll.arguments import shown
from pycoll.errors import UsageError


class premul(str):
    """A sum of inputs, each multiplied by its rank's factor first.

    Args:
        factor: Factor of this rank's input. The product is computed in the accumulation type of the
            dtype and rounded once before the sum. Real for complex arrays, integral for integers.

    Raises:
        UsageError: `factor` is no real number.

    Cost: one more pass over the input.
    Source: NCCL's PreMulSum.
    """

    __slots__ = ("factor",)

    factor: float

    def __new__(cls, factor: float) -> premul:
        self = super().__new__(cls, "premul")
        try:
            self.factor = float(factor)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"premul: factor is {shown(factor)}, expected a real number") from None
        return self

    def __repr__(self) -> str:
        return f"premul({self.factor!r})"

    def __reduce__(self) -> tuple[type[premul], tuple[float]]:
        return premul, (self.factor,)
