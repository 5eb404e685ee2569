"""Gossip beside all-reduce on slow links: time of a step, and the accuracy of the mean model.

python benchmarks/gossip_hosts.py --json gossip.json

Hosts are network namespaces of this machine, one replica on each; their links have a rate, and each
packet takes a time. Needs root, iproute2 and NFQUEUE. Replicas learn handwritten digits: one
script, in which only the switch `replicas=` differs. Trainings of all ways take turns.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch._dynamo  # torch's optimizers import it: once, before ranks are forked
import typer
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "hosts")]

from delayed import throttled, why_not_delayed  # noqa: E402
from namespaces import Network, values, why_not  # noqa: E402
from replicas import Task, digits  # noqa: E402

import pycoll  # noqa: E402
from pycoll import parallel as pc  # noqa: E402
from pycoll.bench.record import write_results  # noqa: E402

LIMIT_S = 300.0  # of a training
MODES = ("allreduce", "gossip:graph=ring", "gossip:graph=one_peer_exponential")


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of several trainings.

    Attributes:
        step_s: Median time of a step of the slowest replica.
        factor: The time of all-reduce, divided by this.
        accuracy: Of the mean of all replicas' weights, on the test set.
        nbytes: Bytes that a replica sent for a step, averages of weights at the end included.
    """

    mode: str
    hosts: int
    parameters: int
    step_s: float
    factor: float
    accuracy: float
    nbytes: float


def model_of(hidden: int) -> nn.Module:
    """A layer of hidden units between pixels and digits."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def trained(
    comm: pycoll.Communicator, task: Task, mode: str, hidden: int, steps: int
) -> tuple[float, float, float]:
    """The median time of a step, the accuracy, and the bytes that this replica sent for a step."""
    torch.set_num_threads(1)
    mesh = pc.mesh(dp=-1, comm=comm)
    with pc.keyed_init(mesh, seed=0):
        model = model_of(hidden)
    model = pc.parallelize(model, mesh, replicas=mode)
    optimizer: Any = pc.optimizer(torch.optim.SGD(model.parameters(), lr=task.lr))
    batches, times_s = task.batches(comm.rank, comm.size), []
    comm.barrier()
    for _ in range(steps):
        x, y = next(batches)
        begun_s = time.monotonic()
        model.step(x, y, loss=task.loss)
        optimizer.step()
        times_s.append(time.monotonic() - begun_s)
    ring = 2 * (comm.size - 1) / comm.size  # bytes that a rank sends for each of an all_reduce
    sent = sum(
        entry.nbytes * (ring if name == "all_reduce" else 1)
        for (_, name), entry in mesh.ledger.entries.items()
        if name != "recv"
    )
    with optimizer.mean_weights() if mode != "allreduce" else torch.no_grad():
        accuracy = task.score(model)
    optimizer.close()
    mesh.close()
    return median(times_s), accuracy, sent / steps


def measure(network: Network, hidden: int, steps: int, rounds: int) -> list[Result]:
    """All ways, with one size of the model."""
    task, found = digits(), {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode, of_mode in found.items():
            pids = network.start_ranks(trained, 1, task, mode, hidden, steps, timeout_s="60")
            ranks = values(network.outcomes(pids, LIMIT_S))
            step_s, accuracy, nbytes = zip(*ranks, strict=True)
            of_mode.append((max(step_s), accuracy[0], max(nbytes)))
    size = sum(p.numel() for p in model_of(hidden).parameters())
    medians = {mode: [median(x) for x in zip(*of, strict=True)] for mode, of in found.items()}
    base_s = medians["allreduce"][0]
    return [
        Result(mode, network.n, size, step_s, base_s / step_s, accuracy, nbytes)
        for mode, (step_s, accuracy, nbytes) in medians.items()
    ]


def table(results: list[Result]) -> str:
    """Results in Markdown."""
    lines = [
        "| hosts | parameters | `replicas=` | ms per step | factor | accuracy of the mean "
        "| kB sent per step and replica |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.hosts} | {r.parameters:,} | `{r.mode}` | {r.step_s * 1e3:.1f} | {r.factor:.1f} "
        f"| {r.accuracy:.4f} | {r.nbytes / 1e3:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def main(
    hosts: Annotated[str, typer.Option(help="Numbers of hosts.")] = "4,8",
    hidden: Annotated[str, typer.Option(help="Sizes of the hidden layer.")] = "64,4096",
    delay_ms: Annotated[float, typer.Option(help="Time of a packet, one way.")] = 5.0,
    steps: Annotated[int, typer.Option(help="Steps of a training.", min=1)] = 180,
    rounds: Annotated[int, typer.Option(help="Trainings of each way.", min=1)] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Writes a record.")] = None,
) -> None:
    """Measures gossip and all-reduce on hosts at 1 Gbit/s, and prints a table."""
    if why := why_not() or why_not_delayed():
        raise SystemExit(why)
    results = []
    for num_hosts in map(int, hosts.split(",")):
        with throttled(num_hosts, delay_ms / 1e3) as network:
            for size in map(int, hidden.split(",")):
                found = measure(network, size, steps, rounds)
                typer.echo("\n".join(json.dumps(asdict(result)) for result in found), err=True)
                results += found
    typer.echo(table(results))
    if json_path is not None:
        write_results(json_path, results, delay_ms=delay_ms, rate="1gbit")


if __name__ == "__main__":
    typer.run(main)
