"""Compares pycoll's trainers with torch's: seconds of a training step in each mode, in one run.

python benchmarks/trainers.py --json trainers.json
python benchmarks/trainers.py --modes "dp,zero 3" --rounds 40
python benchmarks/trainers.py --quick

All variants are trained by the same two ranks, of one thread each. In each round every variant has
a turn of one step, so that a slow spell of the machine falls on all. A time is that of the slowest
rank, the median over rounds. CPU time is that of all threads of the slowest rank: other processes
hardly disturb it. `none` is a rank that trains by itself, without communication. Losses
of the variants of a mode are compared.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from trainer_variants import BACKENDS, Rank, Size, Step, variants

import pycoll
import pycoll.torch
from pycoll.bench.measure import agree
from pycoll.bench.record import write_results
from pycoll.bench.timing import Effort, measure_here, pinned

NUM_RANKS = 2
LIMIT_S = 3600.0  # no fewer rounds, however long a step takes
WARMUP = 3  # steps; more than the uses after which an array is registered
QUICK = Size(dim=64, blocks=2, vocab=128, context=32, heads=4)
MOST = 0.95  # of the time of torch over pycoll, the goal in each mode
MOST_OF_NONE = 1.12  # of the time without communication, the goal of dp
EPILOG = """[bold]Examples[/bold]

  python benchmarks/trainers.py --json trainers.json

  python benchmarks/trainers.py --modes "dp,zero 3" --rounds 40

  python benchmarks/trainers.py --backends pycoll --rounds 8

  python benchmarks/trainers.py --quick
"""

Rows = list[dict[str, Any]]


def work(
    comm: pycoll.Communicator,
    path: str,
    size: Size,
    modes: list[str],
    backends: list[str],
    rounds: int,
) -> Rows:
    """Measures every variant, on each rank. Collective."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, comm.size), rank=comm.rank, world_size=comm.size
    )
    groups = {"gloo": dist.group.WORLD, "pycoll": dist.new_group(backend="pycoll")}
    rank = Rank(comm, groups, size)
    known = variants(size, backends)
    steps = {f"{mode}: {name}": make(rank) for mode in modes for name, make in known[mode].items()}
    losses = {name: _mean(comm, [step() for _ in range(WARMUP)]) for name, step in steps.items()}
    cpu_s: dict[str, list[float]] = {name: [] for name in steps}
    counted = {name: partial(_counted, step, cpu_s[name]) for name, step in steps.items()}
    effort = Effort(rounds, rounds=rounds, limit_s=LIMIT_S, most_calls=1)
    with pinned(comm.rank, comm.size):
        timings = measure_here(
            counted, comm.barrier, lambda value: agree(comm, value), effort, warmup=0
        )
    dist.destroy_process_group()
    cpu = {key: agree(comm, median(times_s[-rounds:])) for key, times_s in cpu_s.items()}
    return [
        {
            "mode": mode,
            "library": name,
            "losses": losses[key],
            **asdict(timings[key]),
            "cpu_s": cpu[key],
        }
        for key in steps
        for mode, _, name in [key.partition(": ")]
    ]


def _counted(step: Step, times_s: list[float]) -> None:
    """Runs a step, and records the CPU time of all threads of this process."""
    start_s = time.process_time()
    step()
    times_s.append(time.process_time() - start_s)


def _mean(comm: pycoll.Communicator, losses: list[float]) -> list[float]:
    found = torch.tensor(losses, dtype=torch.float64)
    comm.all_reduce(found)
    return (found / comm.size).tolist()


def wrong(rows: Rows) -> list[str]:
    """Texts about variants whose losses differ from those of the first one of their mode."""
    first: dict[str, dict[str, Any]] = {}
    texts = []
    for row in rows:
        expected = first.setdefault(row["mode"], row)
        pairs = zip(row["losses"], expected["losses"], strict=True)
        if not all(math.isclose(got, want, rel_tol=1e-4) for got, want in pairs):
            texts.append(
                f"{row['mode']}: {row['library']} has the losses {row['losses']}, "
                f"{expected['library']} {expected['losses']}"
            )
    return texts


def table(rows: Rows) -> str:
    """Milliseconds of a step, and the ratios that the goals are about, as Markdown."""
    cpu = {(row["mode"], row["library"].rpartition(", ")[2]): row["cpu_s"] for row in rows}
    ms = {(row["mode"], row["library"]): row["median_s"] * 1e3 for row in rows}
    alone = ms.get(("none", "torch"))
    lines = [
        "| mode | torch's | over gloo | over pycoll | pc | pc / torch over pycoll | CPU time "
        "| pc / none |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        names = [row["library"] for row in rows if row["mode"] == mode]
        what = next((name.partition(",")[0] for name in names if name != "pc"), "")
        of = {name.rpartition(", ")[2]: ms[mode, name] for name in names}
        own, peer = of.get("pc"), of.get("pycoll")
        cells = [f"{of[key]:.0f}" if key in of else "" for key in ("gloo", "pycoll", "pc")]
        cells.append(f"{own / peer:.3f}" if own and peer else "")
        both = cpu.get((mode, "pc")), cpu.get((mode, "pycoll"))
        cells.append(f"{both[0] / both[1]:.3f}" if both[0] and both[1] else "")
        cells.append(f"{own / alone:.3f}" if own and alone else "")
        if mode == "none":
            mode, what = "none", f"one process: {ms['none', 'torch']:.0f} ms"
        lines.append(f"| {mode} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def missed(rows: Rows) -> list[str]:
    """Texts about the goals that are not reached."""
    ms = {(row["mode"], row["library"].rpartition(", ")[2]): row["median_s"] for row in rows}
    texts = []
    for (mode, library), own_s in ms.items():
        if library != "pc":
            continue
        peer_s, alone_s = ms.get((mode, "pycoll")), ms.get(("none", "torch"))
        if peer_s and own_s > MOST * peer_s:
            texts.append(f"{mode}: {own_s / peer_s:.3f} of torch's over pycoll, goal {MOST}")
        if mode == "dp" and alone_s and own_s > MOST_OF_NONE * alone_s:
            texts.append(f"dp: {own_s / alone_s:.3f} of no communication, goal {MOST_OF_NONE}")
    return texts


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(epilog=EPILOG)
def main(
    modes: Annotated[str, typer.Option(help="Modes, with commas between; default: all.")] = "",
    backends: Annotated[str, typer.Option(help="Of torch's variants.")] = ",".join(BACKENDS),
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which all have a turn.")] = 20,
    quick: Annotated[bool, typer.Option(help="A tiny model, three rounds.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows.")] = None,
) -> None:
    """Compare pycoll's trainers with torch's on two ranks; 6 minutes on two cores."""
    size, rounds = (QUICK, 3) if quick else (Size(), rounds)
    known = list(variants(size))
    chosen = [mode.strip() for mode in modes.split(",")] if modes else known
    if unknown := [mode for mode in chosen if mode not in known]:
        raise typer.BadParameter(f"there is no mode {unknown[0]!r}, expected {', '.join(known)}")
    of_torch = [name.strip() for name in backends.split(",")]
    if unknown := [name for name in of_torch if name not in BACKENDS]:
        raise typer.BadParameter(f"there is no backend {unknown[0]!r}: {', '.join(BACKENDS)}")
    facts = {"torch": torch.__version__, "size": asdict(size), "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", size, chosen, of_torch, rounds)
        rows = pycoll.run_ranks(work, NUM_RANKS, *arguments, timeout_s=120)[0]
    if json_file is not None:
        write_results(json_file, rows, **facts)
    print(table(rows))
    for text in missed(rows):
        print(f"not reached: {text}")
    if texts := wrong(rows):
        print("\n".join(texts))
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
