"""The table of `pycoll scale`: a law fitted to steps, and each step beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycoll.errors import UsageError
from pycoll.parallel.tools import scaling_laws
from pycoll.parallel.tools.step_parts import StepParts


@dataclass(frozen=True, slots=True)
class Times:
    """Measured or known steps by number of ranks.

    Attributes:
        steps: The step of each number of ranks.
        alone_s: Seconds of one rank for the step of n ranks; None: not measured.
    """

    steps: dict[int, StepParts]
    alone_s: dict[int, float] | None = None


def report(found: Times, strong: bool | None = None) -> dict[str, Any]:
    """Fits a scaling law to steps by number of ranks.

    Args:
        found: The steps.
        strong: Whether the batch should be constant (True) or grow with the ranks (False); None:
            as it is.

    Raises:
        UsageError: The batch is neither constant nor proportional to the ranks, or the other one.
    """
    times = {n: step.seconds for n, step in found.steps.items()}
    tokens = {n: step.tokens for n, step in found.steps.items()}
    constant = len(set(tokens.values())) == 1
    grows = all(count == n * tokens[1] for n, count in tokens.items()) and any(tokens.values())
    if not (constant or grows) or strong not in (None, constant):
        expected = {None: "a constant number, or one proportional to n", True: "a constant number"}
        raise UsageError(
            f"scale: tokens of a step are {tokens}: expected "
            f"{expected.get(strong, 'one proportional to n')}"
        )
    if constant:
        fit = scaling_laws.fit_amdahl(times)
    else:
        fit = scaling_laws.fit_gustafson(times, found.alone_s or {n: n * times[1] for n in times})
    rows = [
        {
            "ranks": n,
            "speed_up": fit.speed_up[n],
            "law": fit.law[n],
            "efficiency": fit.efficiency[n],
            "serial": scaling_laws.karp_flatt(fit.speed_up[n], n) if n > 1 else None,
            "seconds": times[n],
            "tokens": tokens[n],
        }
        | (_parts(step) if step.tokens else {})
        | ({} if found.alone_s is None else {"alone_s": found.alone_s[n]})
        for n, step in found.steps.items()
    ]
    return {"kind": "strong" if constant else "weak", "parallel": fit.parallel, "rows": rows}


def _parts(step: StepParts) -> dict[str, float]:
    return {name: getattr(step, name) for name in ("compute_s", "communication_s", "waiting_s")}


__all__ = ["Times", "report"]
