"""Compares the torch backend with gloo: dist.all_reduce by size, and a DDP step; one run.

Both backends are groups of the same ranks. In each round every size is measured with both, in turn,
so that a slow spell of the machine falls on both alike. A time is that of the slowest rank, the
median over rounds. `comm` is the core without torch, whose distance is what the torch layer costs.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from record import machine

import pycoll
import pycoll.torch

SIZES = [4, 64, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 64 << 20]


def timed(call: Callable[[], Any], num_calls: int, fence: Callable[[], Any]) -> float:
    """Microseconds of one call, on this rank."""
    fence()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - began) / num_calls * 1e6


def slowest(comm: pycoll.Communicator, value: float) -> float:
    return float(comm.all_reduce(torch.tensor([value], dtype=torch.float64), "max")[0])


def measure_sizes(
    comm: pycoll.Communicator, groups: dict[str, Any], sizes: list[int], rounds: int
) -> list[dict[str, Any]]:
    samples: dict[tuple[int, str], list[float]] = {}
    backend = groups["pycoll"]._get_backend(torch.device("cpu"))
    for round_idx in range(rounds + 1):  # the first one warms up
        for nbytes in sizes:
            x = torch.zeros(nbytes // 4)
            own = backend.allocate_tensor(
                nbytes // 4, dtype=torch.float32, device=torch.device("cpu")
            ).zero_()
            calls = {
                "comm": lambda x=x: comm.all_reduce(x),
                "pycoll": lambda x=x: dist.all_reduce(x, group=groups["pycoll"]),
                "gloo": lambda x=x: dist.all_reduce(x, group=groups["gloo"]),
                "pycoll async": lambda x=x: dist.all_reduce(
                    x, group=groups["pycoll"], async_op=True
                ).wait(),
                "allocate_tensor": lambda own=own: dist.all_reduce(own, group=groups["pycoll"]),
            }
            for name, call in calls.items():
                num_calls = max(1, (20 if name == "gloo" else 200) * 4096 // max(nbytes, 4096))
                sample = slowest(comm, timed(call, num_calls, comm.barrier))
                if round_idx > 0:
                    samples.setdefault((nbytes, name), []).append(sample)
    rows = []
    for nbytes in sizes:
        medians = {
            name: statistics.median(times)
            for (size, name), times in samples.items()
            if size == nbytes
        }
        rows.append({"nbytes": nbytes, "time_us": medians})
    return rows


def check(groups: dict[str, Any], rank: int, n: int) -> None:
    """Both backends agree, outside what is timed."""
    for group in groups.values():
        x = torch.arange(100_003, dtype=torch.float32) + rank
        dist.all_reduce(x, group=group)
        expected = n * torch.arange(100_003, dtype=torch.float32) + n * (n - 1) / 2
        assert torch.equal(x, expected)


def measure_ddp(comm: pycoll.Communicator, groups: dict[str, Any], rounds: int) -> dict[str, float]:
    """Milliseconds of one step of a model with 25 million parameters, by backend."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    models = {
        name: torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=True
        )
        for name, group in groups.items()
    }
    x = torch.randn(1, 2048)

    def step(model: torch.nn.Module) -> None:
        model.zero_grad()
        model(x).sum().backward()

    samples: dict[str, list[float]] = {name: [] for name in models}
    for round_idx in range(rounds + 2):
        for name, model in models.items():
            sample = slowest(comm, timed(lambda model=model: step(model), 1, comm.barrier))
            if round_idx > 1:
                samples[name].append(sample / 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


def work(
    comm: pycoll.Communicator, path: str, sizes: list[int], rounds: int, ddp: bool
) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, comm.size), rank=comm.rank, world_size=comm.size
    )
    groups = {"gloo": dist.group.WORLD, "pycoll": dist.new_group(backend="pycoll")}
    check(groups, comm.rank, comm.size)
    result: dict[str, Any] = {"num_ranks": comm.size}
    result["all_reduce"] = measure_sizes(comm, groups, sizes, rounds)
    if ddp:
        result["ddp_step_ms"] = measure_ddp(comm, groups, rounds)
    dist.destroy_process_group()
    return result


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['num_ranks']} ranks, microseconds")
    names = list(result["all_reduce"][0]["time_us"])
    print("bytes".rjust(10), *(name.rjust(16) for name in names), "gloo / pycoll".rjust(14))
    for row in result["all_reduce"]:
        times = row["time_us"]
        cells = [f"{times[name]:16.2f}" for name in names]
        print(f"{row['nbytes']:10d}", *cells, f"{times['gloo'] / times['pycoll']:14.1f}")
    if step := result.get("ddp_step_ms"):
        print(
            f"DDP step: gloo {step['gloo']:.1f} ms, pycoll {step['pycoll']:.1f} ms: "
            f"{step['gloo'] / step['pycoll']:.2f}x"
        )


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4",
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which all have a turn.")] = 20,
    max_bytes: Annotated[int, typer.Option(help="Largest message.")] = SIZES[-1],
    ddp: Annotated[bool, typer.Option(help="Measure a DDP step too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result.")] = None,
) -> None:
    """Measures, prints, and writes what was measured."""
    sizes = [size for size in SIZES if size <= max_bytes]
    results = []
    for n in (int(text) for text in ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            results.append(
                pycoll.run_ranks(work, n, f"{folder}/store", sizes, rounds, ddp, timeout_s=120)[0]
            )
        show(results[-1])
    if json_file is not None:
        facts = {"machine": machine(), "torch": torch.__version__, "python": sys.version.split()[0]}
        json_file.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
