"""Compares pycoll's all_reduce with gloo, Open MPI, MPICH and Intel MPI, in one run.

All libraries' ranks are started at once and sleep; each size is measured in several rounds, and in
each round every library has one turn, in shuffled order, while all others sleep. A slow spell of
the machine thus falls on all of them alike. docs/benchmarks.md says how to read the result.
"""

from __future__ import annotations

import datetime
import json
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from floor import Floor, measure_floor
from jobs import Job
from peers import LIBRARIES, PeerError, install
from report import (
    Timing,
    Timings,
    machine,
    plot,
    record,
    size_name,
    table,
    time_name,
    verdict_line,
    verdicts,
)
from rich.console import Console
from rich.markup import escape

ROOT = Path(__file__).resolve().parent.parent
BENCH_DIR = ROOT / ".bench"
MIN_NBYTES, MAX_NBYTES = 4, 64 << 20
# A sample is a block of calls: long enough for the clock, which costs some 50 ns, not to matter.
BLOCK_US, MAX_CALLS = 100.0, 50
TURN_US, WARMUP_US = 200_000.0, 2_000.0

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=140)  # A log: do not fold the tables.
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def parse_size(text: str) -> int:
    """4, 64K, 16M or 1KiB as bytes; f32 needs a multiple of 4."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits = text.strip().upper().removesuffix("B").removesuffix("I").rstrip()
    unit = digits[-1:] if digits[-1:] in "KMG" else ""
    try:
        nbytes = int(digits.removesuffix(unit)) * units[unit]
    except ValueError:
        raise typer.BadParameter(
            f"size {text!r}: expected a number such as 4, 64K or 16M"
        ) from None
    if nbytes < 4 or nbytes % 4:
        raise typer.BadParameter(f"size {text!r}: expected a positive multiple of 4 bytes (f32)")
    return nbytes


def turn_plan(call_us: float, quick: bool) -> tuple[int, int, int]:
    """Warm-up calls, samples and calls per sample of one turn, for calls of about call_us."""
    block = round(min(max(BLOCK_US / call_us, 1), MAX_CALLS))
    fewest, most = (7, 10) if quick else (4, 20)
    samples = round(min(max(TURN_US / (call_us * block), fewest), most))
    warmup = round(min(max(WARMUP_US / call_us, 1), 2 * MAX_CALLS))
    return warmup, samples, block


def measure_size(
    jobs: dict[str, Job], nbytes: int, quick: bool, failures: dict[str, str]
) -> dict[str, Timing]:
    """All rounds of one size; a library that fails is stopped, reported and left out."""
    plans: dict[str, tuple[int, int, int]] = {}
    samples_us: dict[str, list[float]] = {name: [] for name in jobs}
    # The first pass checks the sums and finds out how long a call takes; the others measure.
    for round_idx in range(1 + (3 if quick else 8)):
        for name in random.sample(list(jobs), len(jobs)):
            try:
                if round_idx == 0:
                    jobs[name].check(nbytes)
                    # Twice: a library's first calls of a size may plan, connect and fault pages in.
                    trial_us = jobs[name].measure(nbytes, warmup=1, samples=3, block=1)
                    trial = turn_plan(statistics.median(trial_us), quick)
                    warm_us = jobs[name].measure(nbytes, *trial)
                    plans[name] = turn_plan(statistics.median(warm_us), quick)
                else:
                    samples_us[name] += jobs[name].measure(nbytes, *plans[name])
            except PeerError as error:
                fail(name, str(error), failures)
                jobs.pop(name).stop()
    return {name: Timing.of(samples_us[name], plans[name][2]) for name in jobs}


def fail(name: str, message: str, failures: dict[str, str]) -> None:
    failures[name] = message
    console.print(f"[red bold]{name} is left out:[/] {escape(message)}")


def measure_ranks(
    n: int, names: list[str], sizes: list[int], quick: bool, failures: dict[str, str]
) -> tuple[Timings, dict[str, object]]:
    """Starts n ranks of every library, measures every size, and stops them all."""
    jobs: dict[str, Job] = {}
    timings: Timings = {}
    used: dict[str, object] = {}
    try:
        for name in names:
            try:
                with console.status(f"starting {n} ranks of {name}"):
                    jobs[name] = Job(LIBRARIES[name], n, BENCH_DIR)
                hello = jobs[name].hello[0]
                used[name] = {
                    "version": hello["version"],
                    "versions": hello["versions"],
                    **LIBRARIES[name].settings(n),
                }
            except PeerError as error:
                fail(name, str(error), failures)
        for size_idx, nbytes in enumerate(sizes):
            with console.status(f"{n} ranks, {size_name(nbytes)} ({size_idx + 1} of {len(sizes)})"):
                timings[nbytes] = measure_size(jobs, nbytes, quick, failures)
            medians = (f"{k} {time_name(t.median_us)}" for k, t in timings[nbytes].items())
            console.print(f"{n} ranks {size_name(nbytes):>8} us:  {'  '.join(medians)}")
    finally:
        for job in jobs.values():
            job.stop()
    return timings, used


def prepare(names: list[str], failures: dict[str, str]) -> None:
    """Installs every peer that is not there yet; a failure leaves that peer out."""
    for name in names:
        try:
            with console.status(f"installing {name} into {BENCH_DIR / name} (the first time only)"):
                install(LIBRARIES[name], BENCH_DIR)
        except PeerError as error:
            fail(name, str(error), failures)


@app.command()
def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Message sizes, such as 4,64K,16M.")] = "",
    every: Annotated[int, typer.Option(help="Without --sizes: powers of 4, or of 2.")] = 4,
    libraries: Annotated[str, typer.Option(help="Which libraries.")] = ",".join(LIBRARIES),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples; under 2 minutes.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the record goes.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Plot: .svg or .png.")] = None,
) -> None:
    """Compare the speed of all_reduce (f32, sum) with the peers on this machine.

    Peers are installed into .bench/ when first needed. Examples:

        python benchmarks/compare.py

        python benchmarks/compare.py --quick --ranks 2 --sizes 4,4K,16M

        python benchmarks/compare.py --libraries pycoll,impi --json out.json --plot out.svg
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that `finally` stops the ranks.
    names = [name.strip() for name in libraries.split(",")]
    unknown = set(names) - set(LIBRARIES)
    if unknown:
        raise typer.BadParameter(f"--libraries: {sorted(unknown)} not in {list(LIBRARIES)}")
    if every not in (2, 4):
        raise typer.BadParameter(f"--every: expected 2 or 4, got {every}")
    all_sizes = [MIN_NBYTES * every**i for i in range(25) if MIN_NBYTES * every**i <= MAX_NBYTES]
    chosen = [parse_size(text) for text in sizes.split(",")] if sizes else all_sizes

    started_at = datetime.datetime.now(datetime.timezone.utc)
    start_s = time.monotonic()
    before = machine()
    if before["load_average_1m"] > 0.5:
        console.print(
            f"[yellow]load average is {before['load_average_1m']:.1f}:[/] other processes "
            "are busy, so times are rough, above all with more ranks than cores"
        )
    failures: dict[str, str] = {}
    prepare([name for name in names if LIBRARIES[name].packages], failures)
    floor: Floor | None = None
    try:
        floor = measure_floor(BENCH_DIR)
    except RuntimeError as error:
        console.print(f"[red]no floor:[/] {escape(str(error))}")

    results: dict[int, Timings] = {}
    used: dict[str, object] = {}
    for n in map(int, ranks.split(",")):
        able = [name for name in names if name not in failures]
        results[n], used[str(n)] = measure_ranks(n, able, chosen, quick, failures)

    for n, timings in results.items():
        console.print(table(n, timings, names, floor))
    found = verdicts(results)
    for entry in found:
        console.print(verdict_line(entry))
    for name, message in failures.items():
        console.print(f"[red]{name} failed:[/] {escape(message.splitlines()[0])}")

    json_path = json_path or ROOT / f"benchmarks/results/compare-{started_at:%Y-%m-%d}.json"
    json_path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "started_at": started_at.isoformat(timespec="seconds"),
        "took_s": round(time.monotonic() - start_s, 1),
        "quick": quick,
        "machine": before,
        "floor": floor and {"flight_us": floor.flight_us, "read_gb_per_s": floor.read_gb_per_s},
        "libraries": used,
        "failures": failures,
        "verdicts": found,
        "timings": record(results),
    }
    json_path.write_text(json.dumps(report, indent=1) + "\n")
    plot_path = plot_path or json_path.with_suffix(".svg")
    try:
        plot(results, names, floor, plot_path)
        console.print(f"plot: {plot_path}")
    except ImportError:
        console.print("[yellow]no plot:[/] matplotlib is missing; pip install matplotlib")
    console.print(f"record: {json_path} ({report['took_s']} s)")
    if "pycoll" in failures or len(failures) == len(names):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
