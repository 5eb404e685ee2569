"""What one rank's device can do: arithmetic, memory traffic, and how much it holds."""

from __future__ import annotations

from dataclasses import dataclass

from pycoll.arguments import real_number
from pycoll.errors import UsageError

__all__ = ["Device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A rank's device, from a datasheet or from `pycoll calibrate`.

    Args:
        name: for titles.
        flops_per_s: operations per second at most; a multiplication and an addition are two.
        attained: part of `flops_per_s` that matrix products of models attain, 0 to 1.
        memory_bytes_per_s: bytes read and written per second.
        capacity_bytes: memory of the device; None is unknown.
        operator_s: time that each operator adds, in seconds: its call and its start.

    Raises:
        UsageError: a rate is not positive, or `attained` is not in (0, 1].
    """

    name: str = "device"
    flops_per_s: float
    memory_bytes_per_s: float
    attained: float = 1.0
    capacity_bytes: int | None = None
    operator_s: float = 0.0

    def __post_init__(self) -> None:
        for what in ("flops_per_s", "memory_bytes_per_s", "attained"):
            value = real_number(getattr(self, what), f"device: {what}")
            if not value > 0:
                raise UsageError(f"device {self.name!r}: {what}: expected above 0, got {value:g}")
        if self.attained > 1:
            raise UsageError(
                f"device {self.name!r}: attained: expected a part from 0 to 1, got {self.attained}"
            )

    def seconds(self, flops: float, nbytes: float) -> float:
        """Time of an operator: its start, and its arithmetic or its memory traffic.

        Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009.
        """
        arithmetic_s = flops / (self.flops_per_s * self.attained)
        return self.operator_s + max(arithmetic_s, nbytes / self.memory_bytes_per_s)
