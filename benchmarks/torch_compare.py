"""Compares the torch backend with gloo: dist.all_reduce by size, and a DDP step; one run.

Both backends are groups of the same ranks. In each round every size is measured with both, in turn,
so that a slow spell of the machine falls on both alike. A time is that of the slowest rank, the
median over rounds. `comm` is the core without torch, whose distance is what the torch layer costs.
`pycoll` reduces one tensor again and again, as training does; `pycoll once` is what it takes while
a tensor was not seen often enough for its memory to be moved to where the peers reach it.
"""

from __future__ import annotations

import copy
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

WARM_UPS = 9  # rounds; more than uses after which a tensor's memory is moved
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
    cpu = torch.device("cpu")
    backend = groups["pycoll"]._get_backend(cpu)
    tensors = {
        nbytes: (
            torch.zeros(nbytes // 4),
            torch.zeros(nbytes // 4),
            backend.allocate_tensor(nbytes // 4, dtype=torch.float32, device=cpu).zero_(),
        )
        for nbytes in sizes
    }
    for round_idx in range(rounds + WARM_UPS):
        for nbytes in sizes:
            x, new, own = tensors[nbytes]
            calls = {
                "comm": lambda new=new: comm.all_reduce(new),
                "pycoll": lambda x=x: dist.all_reduce(x, group=groups["pycoll"]),
                "pycoll once": lambda new=new: dist.all_reduce(new, group=groups["pycoll once"]),
                "gloo": lambda new=new: dist.all_reduce(new, group=groups["gloo"]),
                "pycoll async": lambda x=x: dist.all_reduce(
                    x, group=groups["pycoll"], async_op=True
                ).wait(),
                "allocate_tensor": lambda own=own: dist.all_reduce(own, group=groups["pycoll"]),
            }
            for name, call in calls.items():
                at_least = 8 if nbytes <= 1 << 20 else 1
                num_calls = (20 if name == "gloo" else 200) * 4096 // max(nbytes, 4096)
                num_calls = max(at_least, num_calls)
                sample = slowest(comm, timed(call, num_calls, comm.barrier))
                if round_idx >= WARM_UPS:
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
            copy.deepcopy(torch.nn.Sequential(*layers)),
            process_group=group,
            gradient_as_bucket_view=True,
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
    never = pycoll.torch.Options(register_after=0)
    groups = {
        "gloo": dist.group.WORLD,
        "pycoll": dist.new_group(backend="pycoll"),
        "pycoll once": dist.new_group(backend="pycoll", pg_options=never),
    }
    check(groups, comm.rank, comm.size)
    result: dict[str, Any] = {"num_ranks": comm.size}
    result["all_reduce"] = measure_sizes(comm, groups, sizes, rounds)
    if ddp:
        both = {name: groups[name] for name in ("gloo", "pycoll")}
        result["ddp_step_ms"] = measure_ddp(comm, both, rounds)
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
