"""The metrics of a step on every rank, and the line of text that shows them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

from pycoll.parallel.core.step_result import StepResult
from pycoll.parallel.core.writers import Writer

_LATE = 0.1  # part of a step from which on `log` names a late rank


def metrics(
    out: StepResult, *, flops_per_sample: float | None = None, peak: float | None = None
) -> dict[str, float]:
    """Returns the numbers of a step.

    Args:
        out: Result of `model.step`, or the optimizer's `last`, after the optimizer's step.
        flops_per_sample: Operations of both passes for one sample: `pc.flops(model, x).per_sample`.
        peak: Operations per second that one rank's processor can do, for `mfu`.

    Returns:
        `step`, `loss`, `grad_norm`, `tokens`, `tokens_per_s` (summed over all ranks), `samples`,
        `seconds`, `exposed_communication` (share of the time in which this rank waited for
        collectives and messages), `bubble` (share in which its pipeline stage was idle),
        `memory_peak` (most bytes that this process has had in memory, or on its GPU) and `skipped`
        (1 if no rank has stepped). On several ranks also `late_rank` and `late_s` (`Late`); with
        `flops_per_sample` the `flops` of the step and `flops_per_s` of all ranks; with `peak` also
        `mfu`, the share of it. Loss, norm, tokens and lateness are equal on every rank of a replica
        and, but for `replicas=`, on all ranks.
    """
    seconds = max(out.seconds, 1e-9)
    found = {
        "step": out.step,
        "loss": out.loss,
        "grad_norm": float("nan") if out.grad_norm is None else out.grad_norm,
        "tokens": out.tokens,
        "tokens_per_s": out.tokens / seconds,
        "samples": out.samples,
        "seconds": out.seconds,
        "exposed_communication": min(1.0, out.waited_s / seconds),
        "bubble": min(1.0, out.bubble_s / seconds),
        "memory_peak": memory_peak(),
        "skipped": float(out.skipped),
    }
    if out.late is not None:
        found |= {"late_rank": out.late.rank, "late_s": out.late.seconds}
    if flops_per_sample is not None:
        found["flops"] = flops_per_sample * out.samples
        found["flops_per_s"] = found["flops"] / seconds
        if peak is not None:
            found["mfu"] = found["flops_per_s"] / (peak * out.ranks)
    return found


def memory_peak() -> int:
    """Most bytes that this process has had in memory; on its GPU, if it uses one."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def log(
    out: StepResult,
    *,
    every: int = 1,
    total: int | None = None,
    file: Any = None,
    writers: Sequence[Writer] = (),
    flops_per_sample: float | None = None,
    peak: float | None = None,
) -> dict[str, float]:
    """Shows a step as a line on rank 0; a terminal overwrites the previous line.

    If one rank keeps the others waiting for more than a tenth of the step, the line names it, and
    the part of the step in which it is slow.

    Args:
        out: Result of `model.step`, or the optimizer's `last`, after the optimizer's step.
        every: Show only every n-th step, and the last one.
        total: Total number of steps, for the progress display.
        file: Output stream; None: standard error.
        writers: Get the numbers of every step on rank 0, such as `pc.JsonLines("metrics.jsonl")` or
            `pc.TensorBoard("runs")`.
        flops_per_sample: As in `metrics`.
        peak: As in `metrics`.

    Returns:
        The result of `metrics`, on every rank.
    """
    numbers = metrics(out, flops_per_sample=flops_per_sample, peak=peak)
    if out.rank != 0:
        return numbers
    for writer in writers:
        writer.write(numbers)
    file = sys.stderr if file is None else file
    last = total is not None and out.step + 1 == total
    for name in out.unused_now:
        print(f"step {out.step}: no replica used parameter {name}; it is not updated", file=file)
    if out.step % every == 0 or last:
        over = getattr(file, "isatty", lambda: False)() and not last
        text = line(numbers, total)
        if out.late is not None and out.late.seconds > _LATE * out.seconds:
            text += f", {out.late}"
        print("\r" + text, end="" if over else "\n", file=file, flush=True)
    return numbers


def line(numbers: dict[str, float], total: int | None = None) -> str:
    """Formats the numbers of `metrics` as one line of text."""
    place = f"{numbers['step'] + 1:.0f}" + (f"/{total}" if total else "")
    speed = f"{numbers['tokens_per_s']:,.0f} tokens/s"
    if not numbers["tokens"]:  # of a loop that calls loss.backward()
        speed = f"{numbers['samples'] / max(numbers['seconds'], 1e-9):,.0f} samples/s"
    parts = [
        f"step {place:>9}",
        f"loss {numbers['loss']:.4f}",
        f"grad norm {numbers['grad_norm']:.3f}",
        speed,
        f"exposed communication {numbers['exposed_communication']:.0%}",
        f"bubble {numbers['bubble']:.0%}",
    ]
    if "mfu" in numbers:
        parts.append(f"MFU {numbers['mfu']:.1%}")
    if numbers["skipped"]:
        parts.append("skipped: a gradient is not finite")
    return ", ".join(parts)


__all__ = ["line", "log", "memory_peak", "metrics"]
