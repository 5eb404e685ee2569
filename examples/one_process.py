"""Helpers of the torch examples: start, compare with one process, and print the difference."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the option that every example has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument(
        "--backend", default="pycoll", help="backend of torch.distributed, such as gloo"
    )
    return result


@contextmanager
def process_group(backend: str):
    """Context with the process group of all ranks that torchrun started."""
    if backend == "pycoll":
        import pycoll.torch  # noqa: F401  (not needed where pycoll is installed)
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def say(text: str) -> None:
    """Prints on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def check(what: str, compare: Callable[[], float], tolerance: float) -> None:
    """Compares on rank 0; every rank exits with status 1 if the difference is too large."""
    off = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0:
        off[0] = compare()
    dist.broadcast(off, src=0)
    good = off.item() <= tolerance  # false for NaN too
    verdict = "ok" if good else "WRONG"
    say(f"{what}: at most {off.item():.2e} off one process (allowed {tolerance:.0e}): {verdict}")
    if not good:
        sys.exit(1)


def largest_difference(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> float:
    """Returns the largest difference over all tensors; both must have the same names."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return max(
        (tensor.double() - theirs[name].double()).abs().max().item()
        for name, tensor in ours.items()
    )


class Stopwatch:
    """Measures the median time of a step: `with watch: step()`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.start)

    @property
    def median_ms(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2] * 1e3
