# ruff: noqa: E402  -- the path comes first
"""Campaigns: many faults of one kind, counted and timed. `campaign.py --help` shows how.

What the fuzz tests do at random for a while, this does a given number of times for each kind, so
that a figure can be stated: 100 of 100, within so many milliseconds, nothing left.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "comm")]

import faults
import mistakes
import numpy as np
import typer
from comm_cases import builtin_algorithms
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs import Program, programs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from runner import run_program

import pycoll
from pycoll import run_ranks

EXAMPLES = """Examples:

    python tests/fuzz/campaign.py mismatch --tries 100

    python tests/fuzz/campaign.py kill --runs 200 --json kill.json

    python tests/fuzz/campaign.py quiet --minutes 10

    python tests/fuzz/campaign.py splits --count 1000
"""
app = typer.Typer(
    help=__doc__, epilog=EXAMPLES, no_args_is_help=True, add_completion=False,
    rich_markup_mode="markdown",
)  # fmt: skip
console = Console()
Seed = Annotated[int, typer.Option(help="Of the random cases: the same seed, the same cases.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")]


def finish(name: str, rows: list[dict[str, Any]], failures: list[str], path: Path | None) -> None:
    """Prints the summary; a failure ends the program with 1."""
    table = Table(title=name)
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    for failure in failures[:10]:
        console.print(f"FAILED {failure}", markup=False, highlight=False, soft_wrap=True)
    if path is not None:
        report = {"campaign": name, "rows": rows, "failures": failures, "cores": os.cpu_count()}
        path.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"{name}: " + (f"{len(failures)} failures" if failures else "all is well"))
    raise typer.Exit(1 if failures else 0)


def random_mistake(kind: str, rng: random.Random) -> mistakes.Mistake:
    return mistakes.Mistake(
        kind=kind, odd=rng.randrange(60), count=rng.choice(mistakes.SIZES),
        healthy=rng.randrange(4), late=rng.randrange(60), late_ms=rng.choice([0, 0, 1, 5]),
        choice=rng.randrange(60),
    )  # fmt: skip


@app.command(epilog="Example: python tests/fuzz/campaign.py mismatch --tries 20 -n 2")
def mismatch(
    tries: Annotated[int, typer.Option(help="Of each kind.")] = 100,
    ranks: Annotated[list[int], typer.Option("-n", help="Numbers of ranks, in turn.")] = [2, 3, 4],  # noqa: B006
    limit_ms: Annotated[float, typer.Option(help="From the last entry to the last error.")] = 100,
    threads: Annotated[bool, typer.Option(help="Ranks are threads.")] = False,
    seed: Seed = 1,
    json: Json = None,
) -> None:
    """One rank calls something else: every rank raises CollectiveMismatchError, and soon.

    After a skipped call the ranks learn of it in the next one, a barrier, whose entry counts.
    """
    rng = random.Random(seed)
    rows, failures = [], []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("mistakes", total=len(mistakes.KINDS) * tries)
        for kind in mistakes.KINDS:
            times_ms, good = [], 0
            for n in ranks:
                share = len(range(ranks.index(n), tries, len(ranks)))
                made = [random_mistake(kind, rng) for _ in range(share)]
                outcomes = run_ranks(
                    lambda comm, made=made: [mistakes.make(comm, m) for m in made],
                    n, threads=threads, timeout_s=20,
                )  # fmt: skip
                for idx, mistake in enumerate(made):
                    seen = [outcome[idx] for outcome in outcomes]
                    time_ms = 1e3 * mistakes.took_s(seen)
                    complaint = mistakes.complaint(mistake, seen)
                    if not complaint and time_ms > limit_ms:
                        complaint = f"took {time_ms:.0f} ms"
                    good += not complaint
                    times_ms.append(time_ms)
                    if complaint:
                        failures.append(f"n={n} {mistake}: {complaint}")
                progress.advance(task, share)
            rows.append({
                "kind": kind, "tries": tries, "right": good,
                "median ms": float(np.median(times_ms)),
                "p99 ms": float(np.quantile(times_ms, 0.99)), "max ms": max(times_ms),
            })  # fmt: skip
    finish("mismatch", rows, failures, json)


def random_fault(kind: str, rng: random.Random) -> faults.Fault:
    return faults.Fault(
        n=rng.randint(2, 5), threads=False, kind=kind, victim=rng.randrange(60),
        at=rng.randrange(faults.CALLS), at_us=rng.choice([None, rng.randrange(3000)]),
        counts=tuple(rng.choice([1, 100, 4096, 20_000, 131_073, 1_000_000]) for _ in range(2)),
        calls=tuple(rng.choice(faults.CALL_NAMES) for _ in range(rng.randint(1, 4))),
        asynchronous=rng.random() < 0.3,
    )  # fmt: skip


@app.command(epilog="Example: python tests/fuzz/campaign.py kill --runs 20 --kind stop")
def kill(
    runs: Annotated[int, typer.Option(help="In all.")] = 200,
    kind: Annotated[list[str], typer.Option(help="In turn.")] = ["kill", "stop", "exit"],  # noqa: B006
    seed: Seed = 1,
    json: Json = None,
) -> None:
    """A rank is killed, stops or exits at a random point: every survivor raises the right error.

    That is PeerDiedError naming the rank, and after SIGSTOP TimeoutError, within the deadline; and
    no process, file or descriptor is left. The times of SIGSTOP have the timeout of 1 s in them.
    """
    rng = random.Random(seed)
    times_ms: dict[str, list[float]] = {name: [] for name in kind}
    errors: dict[str, Counter[str]] = {name: Counter() for name in kind}
    right: Counter[str] = Counter()
    failures = []
    for threads in (False, True):  # whatever is opened once and for all
        run_ranks(lambda comm: comm.barrier(), 2, threads=threads)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("faults", total=runs)
        for idx in range(runs):
            fault = random_fault(kind[idx % len(kind)], rng)
            outcome = faults.run(fault)
            times_ms[fault.kind].append(1e3 * outcome.slowest_s)
            errors[fault.kind].update(
                one.error for one in outcome.seen if isinstance(one, faults.Seen) and one.error
            )
            right[fault.kind] += not outcome.complaint
            if outcome.complaint:
                failures.append(f"{fault}: {outcome.complaint}")
            progress.advance(task)
    rows = [
        {
            "kind": name, "runs": len(times), "right": right[name],
            "median ms": float(np.median(times)), "p99 ms": float(np.quantile(times, 0.99)),
            "max ms": float(max(times)),
            "errors": ", ".join(f"{count} {error}" for error, count in errors[name].items()),
        }
        for name, times in times_ms.items() if times
    ]  # fmt: skip
    finish("kill", rows, failures, json)


def random_programs(num: int, seed_value: int) -> list[Program]:
    """Whole programs of hypothesis' making."""
    drawn: list[Program] = []

    @settings(
        max_examples=num, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @seed(seed_value)
    @given(programs(at_least=5))
    def draw(program: Program) -> None:
        drawn.append(program)

    draw()
    return drawn


@app.command(epilog="Example: python tests/fuzz/campaign.py quiet --minutes 1")
def quiet(
    minutes: Annotated[float, typer.Option(help="How long.")] = 10,
    seed: Seed = 1,
    json: Json = None,
) -> None:
    """Random calls that agree, for minutes: no error of any kind, and every result is right."""
    end = time.monotonic() + 60 * minutes
    counted, failures, rounds = Counter[str](), [], 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("agreeing calls", total=60 * minutes)
        while (left_s := end - time.monotonic()) > 0 and not failures:
            n, threads = rounds % 5 + 1, rounds // 5 % 2 == 1
            drawn = random_programs(40, seed + rounds)
            try:
                run_ranks(
                    lambda comm, drawn=drawn: [run_program(comm, p) for p in drawn] and None,
                    n, threads=threads, timeout_s=60,
                )  # fmt: skip
            except Exception as error:
                failures.append(f"seed {seed + rounds}, {n} ranks, threads={threads}: {error!r}")
            kind = "threads" if threads else "processes"
            counted[kind] += sum(len(program) for program in drawn)
            rounds += 1
            progress.update(task, completed=60 * minutes - left_s)
    rows = [{"kind": kind, "operations": num} for kind, num in counted.items()]
    finish("quiet", rows, failures, json)


def resources_of_this_process() -> dict[str, int]:
    """What a communicator takes: resident and mapped bytes, mappings, descriptors, threads."""
    maps = Path("/proc/self/smaps_rollup").read_text().split()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident KiB": int(maps[maps.index("Rss:") + 1]),
        "mapped KiB": int(status["VmSize"].split()[0]),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def use_splits(comm: pycoll.Communicator, count: int, report: Any) -> list[dict[str, int]]:
    """Makes, uses and closes them one after another. Resources of this rank before and after."""
    algorithms = [None, *builtin_algorithms("all_reduce")]

    def use(idx: int) -> None:
        n = comm.size
        with comm.split(comm.rank % (1 + idx % 3) if idx % 4 else 0, key=idx) as part:
            x = part.empty(4096, np.float32) if idx % 2 else np.empty(4096, np.float32)
            x[...] = 1
            part.all_reduce(x, algorithm=algorithms[idx % len(algorithms)])
            assert (x == part.size).all()
            if idx % 5 == 0:
                part.all_gather(x)
                part.barrier(async_op=True).wait()
            if idx % 7 == 0 and n > 1:
                part.send(x, part.rank, 3)
                part.recv(x, part.rank, 3)
        del x, part

    found = []
    warm = min(100, count)  # until the allocators have what they keep
    for idx in range(warm):
        use(idx)
    for first in range(0, count, 100):
        comm.barrier()
        found.append(resources_of_this_process())
        comm.barrier()
        for idx in range(first, min(first + 100, count)):
            use(idx)
        report(min(first + 100, count))
    comm.barrier()
    found.append(resources_of_this_process())
    comm.barrier()
    return found


@app.command(epilog="Example: python tests/fuzz/campaign.py splits --count 200")
def splits(
    count: Annotated[int, typer.Option(help="Communicators made from one.")] = 1000,
    ranks: Annotated[int, typer.Option("-n", help="Number of ranks.")] = 3,
    slack_kib: Annotated[int, typer.Option(help="Of resident and mapped memory, a rank.")] = 1024,
    seed: Seed = 1,
    json: Json = None,
) -> None:
    """Communicators split from one, used and closed: memory and descriptors return."""
    rows, failures = [], []
    for threads in (False, True):
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("splits", total=count)

            def report(done: int, progress: Progress = progress, task: Any = task) -> None:
                progress.update(task, completed=done)

            outcomes = run_ranks(use_splits, ranks, count, report, threads=threads, timeout_s=60)
        kind = "threads" if threads else "processes"
        for rank, found in enumerate(outcomes[:1] if threads else outcomes):
            before, after = found[0], found[-1]
            row: dict[str, Any] = {"kind": kind, "rank": rank, "splits": count}
            for what in before:
                row[what] = f"{before[what]} {after[what] - before[what]:+}"
                slack = slack_kib * (ranks if threads else 1) if "KiB" in what else 0
                if after[what] > before[what] + slack:
                    failures.append(f"{kind}, rank {rank}: {what} {row[what]}")
            rows.append(row)
    finish("splits", rows, failures, json)


if __name__ == "__main__":
    app()
