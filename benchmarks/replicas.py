"""Time to accuracy of replicas that stay together in different ways, with and without a straggler.

python benchmarks/replicas.py --json replicas.json --plot docs/images/replicas.svg

One training runs once for each way; only the switch `replicas=` differs. A step of a rank
computes for a stated time (it sleeps for the rest), as if each rank had cores of its
own; messages are real. Time to accuracy is the time of an epoch times the number of epochs.
"""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import torch._dynamo  # torch's optimizers import it: once, before ranks are forked
import typer
from torch import Tensor, nn
from torch.nn import functional

import pycoll
from pycoll import parallel as pc
from pycoll.bench.record import write_results

RANKS, COMPUTE_S, SLOWDOWN = 4, 0.02, 5
MODES = (
    "allreduce",
    "ps:mode=sync",
    "ps:mode=ksync,k=3",
    "ps:mode=ssp,staleness=3",
    "ps:mode=async",
    "ps:mode=async,damping=1",
    "ps:mode=async,compress=int8",
    "gossip:graph=ring",
    "gossip:graph=ring,mode=adpsgd",
    "local:steps=10",
)


@dataclass(frozen=True, slots=True)
class Task:
    """A model, its data, and when it has learned enough.

    Attributes:
        batches: Yields shares of batches for a replica: its rank, the number of replicas.
        steps_per_epoch: Steps of a replica in which all replicas together read all data.
        score: A number of the test data that grows when the model learns.
        target: The score to reach.
        every: Steps between two scores.
        most_steps: Steps after which a training ends.
    """

    make: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]
    steps_per_epoch: int
    loss: Any
    lr: float
    score: Callable[[nn.Module], float]
    target: float
    every: int
    most_steps: int


def digits() -> Task:
    """Handwritten digits, 95 % of the test set; the mean batch of 4 replicas has 64 digits."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:397], order[397:]

    def batches(rank: int, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            shuffled = train[
                torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
            ]
            for part in shuffled[rank::n].split(64 // n):
                yield x[part], y[part]
            epoch += 1

    def score(model: nn.Module) -> float:
        return (model(x[test]).argmax(1) == y[test]).float().mean().item()

    return Task(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        batches,
        -(-len(train) // 64),
        functional.cross_entropy,
        0.2,
        score,
        0.95,
        5,
        300,
    )


def gpt(batch: int = 4) -> Task:
    """The model of examples/gpt.py with 2 layers of 32, to a loss of 2.7 nats on held-out text."""
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "gpt.py"))
    example["GPT"].__init__.__globals__.update(DIM=32, DEPTH=2, HEADS=2)
    text = "".join(topics.values())
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])
    context, held_out = example["CONTEXT"], tokens[-20_000:]
    windows = torch.arange(0, len(held_out) - context - 1, context)[:64, None]
    test = held_out[windows + torch.arange(context + 1)]

    def batches(rank: int, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(rank)
        while True:
            at = torch.randint(len(tokens) - 20_000 - context, (batch, 1), generator=random)
            window = tokens[at + torch.arange(context + 1)]
            yield window[:, :-1], window[:, 1:]

    def score(model: nn.Module) -> float:
        logits = model(test[:, :-1])
        return -functional.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).item()

    return Task(
        lambda: example["GPT"](len(letters)),
        batches,
        (len(tokens) - 20_000) // (batch * RANKS * context),
        pc.cross_entropy,
        0.3,
        score,
        -2.7,
        10,
        400,
    )


TASKS = {"digits": digits, "gpt": gpt}


@dataclass(frozen=True, slots=True)
class Result:
    """What a training took.

    Attributes:
        epoch_s: Seconds in which replica 0 makes the steps of an epoch.
        epochs: Epochs of replica 0 until the target; None: it was not reached.
        accuracy_s: Seconds until then: `epoch_s` times `epochs`.
        steps: Steps of each replica until replica 0 had reached the target or given up.
        nbytes: Bytes that all replicas sent for a step of each.
        staleness: Mean staleness of a parameter server's updates.
        score: Best score.
    """

    task: str
    mode: str
    straggler: bool
    epoch_s: float
    epochs: float | None
    accuracy_s: float | None
    steps: list[int]
    nbytes: float
    staleness: float | None
    score: float


def trained(
    comm: pycoll.Communicator, task: Task, mode: str, straggler: bool
) -> tuple[list[tuple[int, float, list[Tensor]]], int, float, float | None]:
    """Snapshots (step, seconds, weights), the steps, the bytes for a step, and the staleness."""
    mesh = pc.mesh(dp=-1, comm=comm)
    with pc.keyed_init(mesh, seed=0):
        model = task.make()
    model = pc.parallelize(model, mesh, replicas=mode)
    optimizer: Any = pc.optimizer(torch.optim.SGD(model.parameters(), lr=task.lr))
    slow = SLOWDOWN if straggler and comm.rank == comm.size - 1 else 1
    batches = task.batches(comm.rank, comm.size)
    stop = task.most_steps // slow if mode.startswith(("ps:mode=async", "ps:mode=ksync")) else None
    snapshots: list[tuple[int, float, list[Tensor]]] = []
    comm.barrier()
    begun_s, steps = time.monotonic(), 0
    for steps in range(1, (stop or task.most_steps) + 1):
        x, y = next(batches)
        start_s = time.monotonic()
        model.step(x, y, loss=task.loss)
        time.sleep(max(0.0, slow * COMPUTE_S - (time.monotonic() - start_s)))
        optimizer.step()
        if comm.rank == 0 and steps % task.every == 0:
            weights = [p.detach().clone() for p in model.parameters()]
            snapshots.append((steps, time.monotonic() - begun_s, weights))
    inner = optimizer.inner
    staleness = inner.report().mean_staleness if mode.startswith("ps") else None
    ring = 2 * (comm.size - 1) / comm.size  # bytes that a rank sends for each of an all_reduce
    sent = sum(
        entry.nbytes * (ring if name == "all_reduce" else 1)
        for (_, name), entry in mesh.ledger.entries.items()
        if name != "recv"
    )
    optimizer.close()
    mesh.close()
    return snapshots, steps, sent / steps, staleness


def measure(name: str, mode: str, straggler: bool) -> Result:
    """Trains once, and scores the weights that replica 0 had."""
    task = TASKS[name]()
    found = pycoll.run_ranks(trained, RANKS, task, mode, straggler, timeout_s=120)
    snapshots = found[0][0]
    model, best, reached = task.make().eval(), -float("inf"), None
    for step, seconds, weights in snapshots:
        with torch.no_grad():
            for p, value in zip(model.parameters(), weights, strict=True):
                p.copy_(value)
            best = max(best, task.score(model))
        if reached is None and best >= task.target:
            reached = step, seconds
    step, seconds, _ = snapshots[-1]
    epoch_s = (reached[1] / reached[0] if reached else seconds / step) * task.steps_per_epoch
    epochs = reached[0] / task.steps_per_epoch if reached else None
    return Result(
        name,
        mode,
        straggler,
        epoch_s,
        epochs,
        None if epochs is None else epoch_s * epochs,
        [reached[0] if reached and rank == 0 else of[1] for rank, of in enumerate(found)],
        sum(of[2] for of in found),
        found[0][3],
        best,
    )


def table(results: list[Result]) -> str:
    """Results in Markdown: a row for each way, with the straggler beside."""
    lines = [
        "| task | `replicas=` | s/epoch | epochs | time to accuracy, s | with a straggler, s "
        "| kB sent per step, all replicas | mean staleness, with a straggler |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by = {(r.task, r.mode, r.straggler): r for r in results}
    for (task, mode, straggler), r in by.items():
        if straggler:
            continue
        slow = by.get((task, mode, True))
        cells = [task, f"`{mode}`", f"{r.epoch_s:.2f}", _or_none(r.epochs), _or_none(r.accuracy_s)]
        cells += ["" if slow is None else _or_none(slow.accuracy_s), f"{r.nbytes / 1e3:.1f}"]
        stale = [] if r.staleness is None else [f"{r.staleness:.2f}"]
        if slow is not None and slow.staleness is not None:
            stale.append(f"{slow.staleness:.2f}")
        lines.append("| " + " | ".join([*cells, ", ".join(stale)]) + " |")
    return "\n".join(lines)


def _or_none(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.2f}"


def plot(results: list[Result], path: Path) -> None:
    """Bars of the time to accuracy, a panel for each task."""
    from pycoll.draw.style import chunk_colors, matplotlib_module, render

    matplotlib_module()
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(r.task for r in results))
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        modes = list(dict.fromkeys(r.mode for r in results if r.task == task))
        for shift, straggler in ((-0.2, False), (0.2, True)):
            of = {
                r.mode: r.accuracy_s for r in results if (r.task, r.straggler) == (task, straggler)
            }
            places = [i + shift for i, mode in enumerate(modes) if of.get(mode)]
            label = "one replica takes 5 times as long" if straggler else "equal replicas"
            values = [of[mode] for mode in modes if of.get(mode)]
            axes.barh(places, values, 0.38, label=label, color=chunk_colors(2)[straggler])
        axes.set_yticks(range(len(modes)), modes, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{task}: time to accuracy, s", fontsize=10)
        axes.legend(fontsize=7)
    path.write_bytes(render(figure, path.suffix.lstrip(".")))


def main(
    tasks: Annotated[str, typer.Option(help="Tasks, such as digits,gpt.")] = "digits,gpt",
    modes: Annotated[str, typer.Option(help="Ways, separated by spaces.")] = " ".join(MODES),
    json_path: Annotated[Path | None, typer.Option("--json", help="Writes a record.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draws .svg or .png.")] = None,
) -> None:
    """Measures all ways, and prints a table."""
    results = []
    for name in tasks.split(","):
        for mode in modes.split():
            for straggler in (False, True):
                results.append(measure(name, mode, straggler))
                typer.echo(json.dumps(asdict(results[-1])), err=True)
    typer.echo(table(results))
    if json_path is not None:
        write_results(json_path, results)
    if plot_path is not None:
        plot(results, plot_path)


if __name__ == "__main__":
    typer.run(main)
