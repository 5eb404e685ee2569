"""Reduction operators that carry a value."""

from __future__ import annotations


class premul(str):
    """A sum of inputs, each multiplied by its rank's factor first.

    Args:
        factor: Factor of this rank's input. The product is computed in the accumulation type of the
            dtype and rounded once before the sum. Real for complex arrays, integral for integers.

    Cost: one more pass over the input.
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
