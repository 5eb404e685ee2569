"""DiLoCo beside synchronous training: held-out loss of a GPT, and bytes, predicted and counted.

python benchmarks/diloco.py --json diloco.json

Replicas train a small GPT on Python's documentation for as many steps, with the same AdamW and the
same batches: with an all-reduce of gradients in each step, and with local steps whose changes are
exchanged every 50 steps, as floats and as int8. Bytes are what the core's ledger says that replica
0 has sent; the prediction is the formula of the collective.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._dynamo  # torch's optimizers import it: once, before ranks are forked
import typer
from replicas import Task, gpt

import pycoll
from pycoll import parallel as pc
from pycoll import quantisation
from pycoll.bench.record import write_results

BATCH = 8  # sequences of a replica
OUTER = "outer_lr=1,outer_momentum=0.6"  # an outer step of 2.5 mean changes in the long run
WAYS = (
    "allreduce",
    f"local:steps={{steps}},{OUTER}",
    f"local:steps={{steps}},{OUTER},compress=int8",
)


@dataclass(frozen=True, slots=True)
class Result:
    """A training.

    Attributes:
        loss: Of the mean of all replicas' weights on held-out text, nats per character.
        above: How far the loss is above that of "allreduce", as a share of it.
        counted: Bytes that a replica has sent.
        predicted: The same by the formulas.
        fewer: Bytes of "allreduce" divided by these.
    """

    mode: str
    replicas: int
    steps: int
    parameters: int
    loss: float
    above: float
    counted: int
    predicted: float
    fewer: float
    seconds: float


def predicted(mode: str, n: int, count: int, steps: int, every: int) -> float:
    """Bytes that a replica sends in a training, for `count` float32 weights."""
    if mode == "allreduce":
        return steps * 2 * (n - 1) / n * 4 * count
    if "int8" in mode:
        return steps // every * (n - 1) * quantisation.nbytes(count)
    return steps // every * 2 * (n - 1) / n * 4 * count


def trained(
    comm: pycoll.Communicator, task: Task, mode: str, steps: int, lr: float
) -> tuple[float, int, float]:
    """The loss, the bytes that this rank sent, and the seconds of the steps."""
    torch.set_num_threads(1)
    mesh = pc.mesh(dp=-1, comm=comm)
    with pc.keyed_init(mesh, seed=0):
        model = task.make()
    model = pc.parallelize(model, mesh, replicas=mode)
    optimizer: Any = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=lr))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    batches = task.batches(comm.rank, comm.size)
    replicas = mesh.comm("dp")
    before, begun_s = replicas.ledger["sent_bytes"], time.monotonic()
    for _ in range(steps):
        x, y = next(batches)
        model.step(x, y, loss=task.loss)
        optimizer.step()
        schedule.step()
    seconds, sent = time.monotonic() - begun_s, replicas.ledger["sent_bytes"] - before
    with optimizer.mean_weights() if mode != "allreduce" else torch.no_grad(), torch.no_grad():
        loss = -task.score(model.eval())
    optimizer.close()
    mesh.close()
    return loss, sent, seconds


def measure(replicas: int, steps: int, every: int, lr: float) -> list[Result]:
    """All ways, one after the other."""
    task, results = gpt(BATCH), []
    count = sum(p.numel() for p in task.make().parameters())
    for way in WAYS:
        mode = way.format(steps=every)
        found = pycoll.run_ranks(trained, replicas, task, mode, steps, lr, timeout_s=600)
        (loss, _, seconds), counted = found[0], max(sent for _, sent, _ in found)
        first = results[0] if results else None
        results.append(
            Result(
                mode,
                replicas,
                steps,
                count,
                loss,
                0.0 if first is None else loss / first.loss - 1,
                counted,
                predicted(mode, replicas, count, steps, every),
                1.0 if first is None else first.counted / counted,
                seconds,
            )
        )
        typer.echo(json.dumps(asdict(results[-1])), err=True)
    return results


def table(results: list[Result]) -> str:
    """Results in Markdown."""
    lines = [
        "| `replicas=` | held-out loss, nats | above `allreduce` | MB sent per replica | predicted "
        "| fewer bytes |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{r.mode}` | {r.loss:.4f} | {r.above:+.2%} | {r.counted / 1e6:.2f} "
        f"| {r.predicted / 1e6:.2f} | {r.fewer:.1f} times |"
        for r in results
    ]
    return "\n".join(lines)


def main(
    replicas: Annotated[int, typer.Option(help="Ranks.", min=2)] = 2,
    steps: Annotated[int, typer.Option(help="Steps of a training.", min=1)] = 1500,
    every: Annotated[int, typer.Option(help="Local steps between exchanges.", min=1)] = 50,
    lr: Annotated[float, typer.Option(help="Largest learning rate of AdamW.")] = 3e-3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Writes a record.")] = None,
) -> None:
    """Trains in all ways, and prints a table."""
    results = measure(replicas, steps, every, lr)
    typer.echo(table(results))
    if json_path is not None:
        write_results(json_path, results)


if __name__ == "__main__":
    typer.run(main)
