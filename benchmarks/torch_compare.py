"""Compares the torch backend with gloo: dist.all_reduce by size, and a DDP step; one run.

Both backends are groups of the same ranks. In each round both have a turn of one block of calls, so
that a slow spell of the machine falls on both. A time is that of the slowest rank, the median over
rounds. `comm` is the core without torch, and `torch` is torch without a collective (its backend
"fake"): what `pycoll` takes beyond both is the cost of the backend. `pycoll` reduces one tensor
repeatedly, as training does; in `pycoll once` tensors are never registered.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"
import typer

import pycoll
import pycoll.torch
from pycoll.bench.case import Case
from pycoll.bench.measure import agree
from pycoll.bench.record import Record, Row, by_library, machine
from pycoll.bench.timing import Effort, Timing, measure_here

LIMIT_S = 4.0  # for all blocks of one call

SIZES = [4, 64, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 64 << 20]


def measure_calls(
    comm: pycoll.Communicator, calls: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, Timing]:
    """Times calls in turn, round after round. Collective."""
    effort = Effort(rounds, rounds=rounds, limit_s=LIMIT_S)
    return measure_here(calls, comm.barrier, lambda value: agree(comm, value), effort)


def measure_size(
    comm: pycoll.Communicator, groups: dict[str, Any], nbytes: int, rounds: int
) -> list[Row]:
    cpu = torch.device("cpu")
    backend = groups["pycoll"]._get_backend(cpu)
    x, new = torch.ones(nbytes // 4), torch.ones(nbytes // 4)  # zeros may be faster
    own = backend.allocate_tensor(nbytes // 4, dtype=torch.float32, device=cpu).fill_(1)
    calls = {
        "comm": lambda: comm.all_reduce(new),
        "torch": lambda: dist.all_reduce(new, group=groups["torch"]),
        "pycoll": lambda: dist.all_reduce(x, group=groups["pycoll"]),
        "pycoll once": lambda: dist.all_reduce(new, group=groups["pycoll once"]),
        "gloo": lambda: dist.all_reduce(new, group=groups["gloo"]),
        "pycoll async": lambda: dist.all_reduce(x, group=groups["pycoll"], async_op=True).wait(),
        "allocate_tensor": lambda: dist.all_reduce(own, group=groups["pycoll"]),
    }
    timings = measure_calls(comm, calls, rounds)
    case = Case.of_size("all_reduce", "f32", comm.size, nbytes)
    return [Row(case.of_library(name), timing) for name, timing in timings.items()]


def check(groups: dict[str, Any], rank: int, n: int) -> None:
    """Both backends agree, outside what is timed."""
    for group in groups.values():
        x = torch.arange(100_003, dtype=torch.float32) + rank
        dist.all_reduce(x, group=group)
        expected = n * torch.arange(100_003, dtype=torch.float32) + n * (n - 1) / 2
        assert torch.equal(x, expected)


def reduce_nothing(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations in quotes
    """A hook for DDP: gradients as they are, at once."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def measure_ddp(comm: pycoll.Communicator, groups: dict[str, Any], rounds: int) -> dict[str, float]:
    """Milliseconds of one step of a model with 25 million parameters, by backend; "none": of one
    without communication."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    models = {
        name: torch.nn.parallel.DistributedDataParallel(
            copy.deepcopy(torch.nn.Sequential(*layers)),
            process_group=group,
            gradient_as_bucket_view=True,
        )
        for name, group in {**groups, "none": groups["pycoll"]}.items()
    }
    models["none"].register_comm_hook(None, reduce_nothing)
    x = torch.randn(1, 2048)

    def step(model: torch.nn.Module) -> None:
        model.zero_grad()
        model(x).sum().backward()

    calls = {name: partial(step, model) for name, model in models.items()}
    timings = measure_calls(comm, calls, rounds)
    return {name: timing.median_s * 1e3 for name, timing in timings.items()}


def work(
    comm: pycoll.Communicator, path: str, sizes: list[int], rounds: int, ddp: bool
) -> tuple[list[Row], dict[str, float]]:
    """Every size and a step of DDP, on each rank. Collective."""
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
    groups["torch"] = dist.new_group(backend="fake")
    rows = [row for size in sizes for row in measure_size(comm, groups, size, rounds)]
    step_ms = {}
    if ddp:
        both = {name: groups[name] for name in ("gloo", "pycoll")}
        step_ms = measure_ddp(comm, both, rounds)
    dist.destroy_process_group()
    return rows, step_ms


def show(messages: list[list[Row]], step_ms: dict[str, float]) -> None:
    print(f"\n{messages[0][0].case.num_ranks} ranks, microseconds")
    names = [row.case.library for row in messages[0]]
    print("bytes".rjust(10), *(name.rjust(16) for name in names), "gloo / pycoll".rjust(14))
    for rows in messages:
        times = by_library(rows)
        cells = [f"{times[name].median_s * 1e6:16.2f}" for name in names]
        ratio = times["gloo"].median_s / times["pycoll"].median_s
        print(f"{rows[0].case.nbytes:10d}", *cells, f"{ratio:14.1f}")
    if step_ms:
        gloo, own = step_ms["gloo"], step_ms["pycoll"]
        print(
            f"DDP step: gloo {gloo:.1f} ms, pycoll {own:.1f} ms: {gloo / own:.2f}x; "
            f"without communication {step_ms['none']:.1f} ms"
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
    facts = {"machine": machine(), "torch": torch.__version__, "ddp_step_ms": {}}
    record = Record(json_file, facts)
    for n in (int(text) for text in ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (f"{folder}/store", sizes, rounds, ddp)
            rows, step_ms = pycoll.run_ranks(work, n, *arguments, timeout_s=120)[0]
        if ddp:
            record.facts["ddp_step_ms"][str(n)] = step_ms
        record.add(*rows)
        show([m for m in record.messages() if m[0].case.num_ranks == n], step_ms)
    record.facts["complete"] = True
    record.save()


if __name__ == "__main__":
    typer.run(main)
