"""Reduction operators that carry a value."""

from __future__ import annotations


class premul(str):
    """The op of a sum of inputs that every rank multiplies by a factor of its own first.

    Args:
        factor: What this rank's input is multiplied by, in the type that its dtype is accumulated
            in; rounded once before the sum. Real for complex arrays, a whole number for integers.

    Cost: One more pass over the input.
    Source: NCCL's PreMulSum.
    """

    __slots__ = ("factor",)

    factor: float

    def __new__(cls, factor: float) -> premul:
        self = super().__new__(cls, "premul")
        self.factor = float(factor)
        return self

    def __repr__(self) -> str:
        return f"premul({self.factor!r})"

    def __reduce__(self) -> tuple[type[premul], tuple[float]]:
        return premul, (self.factor,)
