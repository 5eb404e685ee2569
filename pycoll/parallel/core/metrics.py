"""The metrics of a step on every rank, and the line of text that shows them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from pycoll.parallel.core.step_result import StepResult


def metrics(out: StepResult) -> dict[str, float]:
    """Returns the numbers of a step.

    Args:
        out: Result of `model.step`, after the optimizer's step.

    Returns:
        `step`, `loss`, `grad_norm`, `tokens`, `tokens_per_s` (summed over all ranks), `seconds`,
        `exposed_communication` (share of the time in which this rank waited for collectives and
        messages) and `bubble` (share in which its pipeline stage was idle). Loss, norm and tokens
        are equal on every rank.
    """
    seconds = max(out.seconds, 1e-9)
    return {
        "step": out.step,
        "loss": out.loss,
        "grad_norm": float("nan") if out.grad_norm is None else out.grad_norm,
        "tokens": out.tokens,
        "tokens_per_s": out.tokens / seconds,
        "seconds": out.seconds,
        "exposed_communication": min(1.0, out.waited_s / seconds),
        "bubble": min(1.0, out.bubble_s / seconds),
    }


def log(
    out: StepResult, *, every: int = 1, total: int | None = None, file: Any = None
) -> dict[str, float]:
    """Shows a step as a line on rank 0; a terminal overwrites the previous line.

    Args:
        out: Result of `model.step`, after the optimizer's step.
        every: Show only every n-th step, and the last one.
        total: Total number of steps, for the progress display.
        file: Output stream; None: standard error.

    Returns:
        The result of `metrics`, on every rank.
    """
    numbers = metrics(out)
    if out.rank != 0:
        return numbers
    file = sys.stderr if file is None else file
    last = total is not None and out.step + 1 == total
    for name in out.unused_now:
        print(f"step {out.step}: no replica used parameter {name}; it is not updated", file=file)
    if out.step % every == 0 or last:
        over = getattr(file, "isatty", lambda: False)() and not last
        print("\r" + line(numbers, total), end="" if over else "\n", file=file, flush=True)
    return numbers


def line(numbers: dict[str, float], total: int | None = None) -> str:
    """Formats the numbers of `metrics` as one line of text."""
    place = f"{numbers['step'] + 1:.0f}" + (f"/{total}" if total else "")
    parts: Iterable[str] = (
        f"step {place:>9}",
        f"loss {numbers['loss']:.4f}",
        f"grad norm {numbers['grad_norm']:.3f}",
        f"{numbers['tokens_per_s']:,.0f} tokens/s",
        f"exposed communication {numbers['exposed_communication']:.0%}",
        f"bubble {numbers['bubble']:.0%}",
    )
    return ", ".join(parts)


__all__ = ["line", "log", "metrics"]
