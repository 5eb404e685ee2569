"""Trains a network on handwritten digits with data-parallel ranks, once per all-reduce algorithm.

Every run starts from the same weights and sees the same batches. A rank computes the gradient of
its share of the batch, `comm.all_reduce` averages the gradients, and every rank takes the same
step. A single process trains with the whole batch; in float64 both must end in the same weights.
The core counts the bytes that the ranks send, and the demo compares them with the formula.

    python examples/demo.py --ranks 4 --out out
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pycoll

HIDDEN = 30  # 64*30+30 + 30*10+10 = 2260 parameters
BATCH = 96  # of all ranks together
LEARNING_RATE = 0.2
MOMENTUM = 0.9
TEST_SAMPLES = 357
TOLERANCE = 1e-10
MIN_ACCURACY = 0.95


@dataclass(frozen=True)
class Run:
    """Result of one training run on one rank."""

    losses: list[float]  # of the whole batch, per step
    weights: np.ndarray  # (num_parameters,) float64
    accuracy: float  # on samples that were not trained on
    gradient_bytes: int  # of one all-reduce
    sent_bytes: int  # by this rank, in all gradient all-reduces
    all_reduce_us: float  # median of the gradient's all-reduce alone, after training


def load_digits() -> tuple[Any, Any, Any, Any]:
    """scikit-learn's 1797 8x8 digits as float64 tensors: train x, train y, test x, test y."""
    import torch
    from sklearn.datasets import load_digits as load

    x, y = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = torch.tensor(x[order] / 16.0, dtype=torch.float64), torch.tensor(y[order])
    return x[TEST_SAMPLES:], y[TEST_SAMPLES:], x[:TEST_SAMPLES], y[:TEST_SAMPLES]


def train(
    comm: pycoll.Communicator, algorithm: str | None, epochs: int, on_step: Any = None
) -> Run:
    """Trains on this rank's share of every batch."""
    import torch

    torch.set_num_threads(1)  # the ranks share the cores
    torch.manual_seed(0)
    x, y, test_x, test_y = load_digits()
    model = torch.nn.Sequential(
        torch.nn.Linear(64, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 10)
    ).double()
    # One flat buffer for all gradients: one all-reduce a step. Padded, so that chunks are of equal
    # size and the bytes sent are exactly the formula's.
    parameters = list(model.parameters())
    num_parameters = sum(p.numel() for p in parameters)
    gradient = torch.zeros(num_parameters + -num_parameters % comm.size, dtype=torch.float64)
    velocity = torch.zeros_like(gradient)
    start = 0
    for p in parameters:
        p.grad = gradient[start : start + p.numel()].view_as(p)
        start += p.numel()

    order = torch.Generator().manual_seed(1)
    share = BATCH // comm.size
    losses = []
    sent_before = comm.ledger["sent_bytes"]
    for _ in range(epochs):
        batches = torch.randperm(len(x), generator=order)[: len(x) // BATCH * BATCH]
        for batch in batches.view(-1, BATCH):
            mine = batch[comm.rank * share : (comm.rank + 1) * share]
            gradient.zero_()
            loss = torch.nn.functional.cross_entropy(model(x[mine]), y[mine])
            loss.backward()
            comm.all_reduce(gradient, "avg", algorithm=algorithm)
            losses.append(loss.item())
            velocity.mul_(MOMENTUM).add_(gradient)
            with torch.no_grad():
                start = 0
                for p in parameters:
                    step = velocity[start : start + p.numel()].view_as(p)
                    p.sub_(LEARNING_RATE * step)
                    start += p.numel()
            if on_step is not None:
                on_step()
    sent = comm.ledger["sent_bytes"] - sent_before
    mean_losses = comm.all_reduce(np.array(losses), "avg")
    accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
    weights = torch.nn.utils.parameters_to_vector(parameters).detach().numpy()
    took_s = median_s(comm, gradient.zero_().numpy(), algorithm)
    return Run(list(mean_losses), weights, accuracy, gradient.nbytes, sent, took_s * 1e6)


def median_s(comm: pycoll.Communicator, x: np.ndarray, algorithm: str | None) -> float:
    """Returns the median seconds of one all-reduce of `x` after a barrier."""
    times = []
    for _ in range(60):
        comm.barrier()
        began = time.perf_counter()
        comm.all_reduce(x, algorithm=algorithm)
        times.append(time.perf_counter() - began)
    return statistics.median(times[10:])


def calibrate(comm: pycoll.Communicator) -> tuple[float, float]:
    """Returns alpha (s) and beta (s/byte) of this machine, measured with ring_naive.

    It consists of single hops and takes 2(n-1)(alpha + N beta), where beta includes gamma, so two
    sizes give both.
    """

    hops = max(1, 2 * (comm.size - 1))
    small = median_s(comm, np.zeros(1), "ring_naive")
    large = median_s(comm, np.zeros(1 << 15), "ring_naive")
    alpha = small / hops
    return alpha, max(large / hops - alpha, 0.0) / (1 << 18)


def train_with_all(
    comm: pycoll.Communicator, algorithms: list[str], epochs: int, num_steps: int
) -> tuple[dict[str, Run], tuple[float, float]]:
    """Trains with every algorithm in turn. Rank 0 shows the progress."""
    progress = Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=comm.rank != 0,
    )
    runs = {}
    with progress:
        for algorithm in algorithms:
            task = progress.add_task(algorithm, total=num_steps)
            runs[algorithm] = train(
                comm, algorithm, epochs, on_step=lambda task=task: progress.advance(task)
            )
    return runs, calibrate(comm)


def main(
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks; must divide 96.")] = 4,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder for the schedule pictures.")] = Path("out"),
) -> None:
    """Trains on real data with every all-reduce algorithm and checks each against one process."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    if ranks < 1 or BATCH % ranks:
        console.print(f"[red]--ranks is {ranks}: expected a divisor of {BATCH}, the batch size")
        raise typer.Exit(2)
    algorithms = pycoll.schedule.algorithms("all_reduce")
    train_samples = 1797 - TEST_SAMPLES
    num_steps = epochs * (train_samples // BATCH)
    console.print(
        f"Training 64-{HIDDEN}-10 on {train_samples} digits in float64: {num_steps} steps, "
        f"{ranks} ranks, compared with a single process."
    )
    single = pycoll.run_ranks(train, 1, None, epochs)[0]
    results = pycoll.run_ranks(train_with_all, ranks, algorithms, epochs, num_steps)
    alpha, beta = results[0][1]

    nbytes = results[0][0][algorithms[0]].gradient_bytes
    table = Table(title=f"all_reduce of a {nbytes:,}-byte gradient, {ranks} ranks")
    table.add_column("algorithm", no_wrap=True)
    for heading in (
        "final\nloss",
        "max diff to\n1 process",
        "test\naccuracy",
        "bytes sent\nper rank, step",
        "formula",
        "simulated\nus",
        "measured\nus",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("(single process)", f"{single.losses[-1]:.6f}", "", f"{single.accuracy:.3f}")
    failures = []
    out.mkdir(parents=True, exist_ok=True)
    for algorithm in algorithms:
        runs = [result[0][algorithm] for result in results]
        schedule = pycoll.schedule.build("all_reduce", algorithm, n=ranks)
        row = pycoll.schedule.info("all_reduce", algorithm)
        sent = [run.sent_bytes / num_steps for run in runs]
        formula = [row.sent_fraction(ranks, rank) * nbytes for rank in range(ranks)]
        difference = max(
            float(np.max(np.abs(run.weights - single.weights), initial=0)) for run in runs
        )
        difference = max(
            difference, float(np.max(np.abs(np.subtract(runs[0].losses, single.losses))))
        )
        checks = {
            f"differs from one process by {difference:.1e}": difference <= TOLERANCE,
            f"accuracy {runs[0].accuracy:.3f} is below {MIN_ACCURACY}": runs[0].accuracy
            >= MIN_ACCURACY,
            f"sent {sent} bytes, the formula says {formula}": sent == formula,
            "ranks ended with different bits": len({run.weights.tobytes() for run in runs}) == 1,
        }
        failures += [f"{algorithm}: {what}" for what, good in checks.items() if not good]
        simulated_s = schedule.simulate(nbytes, alpha, beta, 0.0).time_s
        table.add_row(
            algorithm,
            f"{runs[0].losses[-1]:.6f}",
            f"{difference:.1e}",
            f"{runs[0].accuracy:.3f}",
            _spread(sent),
            _spread(formula),
            f"{simulated_s * 1e6:.1f}",
            f"{statistics.median(run.all_reduce_us for run in runs):.1f}",
        )
        schedule.draw(out / f"{algorithm}.svg")
        schedule.draw(out / f"{algorithm}.png")
    console.print(table)
    console.print(
        f"Simulated with alpha {alpha * 1e6:.2f} us and beta {beta * 1e9:.3f} ns/byte, "
        "fitted to ring_naive on this machine. Measured: median of 50 all-reduces of the gradient."
    )
    console.print(f"Pictures of the schedules: {out}/*.svg, {out}/*.png")
    if failures:
        console.print("[red]FAILED:[/red]\n  " + "\n  ".join(failures))
        sys.exit(1)
    console.print(
        f"[green]All {len(algorithms)} algorithms match the single process to {TOLERANCE:g}, "
        "and each rank sends the bytes of its formula."
    )


def _spread(values: list[float]) -> str:
    """Formats values as `27,120` if all ranks have the same, else as `9,040 .. 27,120`."""
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} .. {high:,.0f}"


if __name__ == "__main__":
    typer.run(main)
