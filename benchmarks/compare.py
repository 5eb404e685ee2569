"""Compares pycoll with gloo, DeepSpeed, Open MPI, MPICH and Intel MPI, in one run.

All libraries' ranks are started at once and sleep; each size is measured in several rounds, and in
each round every library has one turn, in shuffled order, while all others sleep. A slow spell of
the machine thus falls on all of them alike. docs/benchmarks.md says how to read the result.
"""

from __future__ import annotations

import datetime
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from floor import Floor, measure_floor
from jobs import Job, UnsupportedError
from measure import FULL, QUICK, Effort, measure_row
from oracle import COLLECTIVES, DTYPES
from peers import LIBRARIES, PeerError, install
from record import Case, Record, RecordError, Row, machine
from report import TITLES, size_name, table, time_name, verdict_line, verdicts
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

ROOT = Path(__file__).resolve().parent.parent
BENCH_DIR = ROOT / ".bench"
MIN_NBYTES, MIB = 4, 1 << 20
MOST_FAILURES = 2  # of one library with so many ranks, before it is left out altogether

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=180)  # A log: do not fold the tables.
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def parse_size(text: str) -> int:
    """4, 64K, 16M or 1KiB as bytes."""
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
        raise typer.BadParameter(f"size {text!r}: expected a positive multiple of 4 bytes")
    return nbytes


def parse_names(text: str, known: Any, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise typer.BadParameter(f"{option}: {', '.join(unknown)} is none of {', '.join(known)}")
    return names


def sizes_of(case: Case, sizes: list[int], every: int, largest: int) -> list[int]:
    """The chosen sizes, or powers; a block of every rank holds at least one element."""
    if not sizes:
        sizes = [MIN_NBYTES * every**i for i in range(28) if MIN_NBYTES * every**i <= largest]
    block = DTYPES[case.dtype][0] * (
        1 if case.collective in ("all_reduce", "broadcast") else case.n
    )
    return sorted({max(nbytes, block) // block * block for nbytes in sizes})


@dataclass(slots=True)
class Run:
    """The measuring itself, from case to case."""

    record: Record
    plan: dict[Case, list[int]]
    names: list[str]
    effort: Effort
    floor: Floor | None
    progress: Progress
    failures: dict[str, int] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)

    def note(self, what: str, message: str) -> None:
        """Something that a reader of the record must know."""
        self.record.facts["notes"][what] = message
        self.progress.console.print(f"[yellow]{what}:[/] {escape(message)}")

    def start(self, name: str, n: int) -> None:
        """Starts a library's ranks, unless it cannot or has failed too often."""
        if self.failures.get(f"{name} {n}", 0) >= MOST_FAILURES:
            return
        self.progress.update(self.progress.task_ids[0], description=f"starting {n} x {name}")
        try:
            self.jobs[name] = Job(LIBRARIES[name], n, BENCH_DIR)
        except UnsupportedError as reason:
            self.failures[f"{name} {n}"] = MOST_FAILURES
            self.note(f"{name} {n}", str(reason))
        except PeerError as error:
            self.failed(name, Case("", "", n), error)
        else:
            hello = self.jobs[name].hello[0]
            used = {"version": hello["version"], "versions": hello["versions"]}
            used |= LIBRARIES[name].settings(n)
            self.record.facts["libraries"].setdefault(str(n), {})[name] = used

    def failed(self, name: str, case: Case, error: PeerError | UnsupportedError) -> None:
        """A library cannot take part in a case: noted once; twice broken, it is left out."""
        if isinstance(error, UnsupportedError):
            key = f"{name}, {case.collective} {case.dtype}"
            if key not in self.record.facts["notes"]:
                self.note(key, str(error))
            return
        key = f"{name} {case.n}"
        self.failures[key] = self.failures.get(key, 0) + 1
        self.note(f"{key} failed ({self.failures[key]})", str(error))

    def measure(self) -> None:
        """Measures all rows that the record does not have."""
        weights = {(case, b): weight(case, b) for case, sizes in self.plan.items() for b in sizes}
        todo = [(case, nbytes) for case, nbytes in weights if not self.record.has(case, nbytes)]
        total, start_s, spent = sum(weights[key] for key in todo), time.monotonic(), 0.0
        before_s = self.record.facts["took_s"]
        task = self.progress.add_task("", total=len(weights), left="")
        self.progress.update(task, completed=len(weights) - len(todo))
        n = 0
        try:
            for case, nbytes in todo:
                if case.n != n:
                    self.stop()
                    n = case.n
                for name in self.names:
                    if name not in self.jobs:
                        self.start(name, n)
                self.progress.update(task, description=f"{case} {size_name(nbytes)}")
                timings = measure_row(
                    self.jobs, case, nbytes, self.effort,
                    lambda name, error, case=case: self.failed(name, case, error),
                )  # fmt: skip
                elapsed_s = time.monotonic() - start_s
                self.record.facts["took_s"] = round(before_s + elapsed_s, 1)
                floor_us = self.floor.us(case.collective, n, nbytes) if self.floor else None
                self.record.add(case, nbytes, Row(floor_us, timings))
                spent += weights[case, nbytes]
                left_s = elapsed_s / spent * (total - spent)
                left = (
                    f"about {left_s / 60:.0f} min left" if left_s > 90 else f"{left_s:.0f} s left"
                )
                self.progress.update(task, advance=1, left=left)
                medians = (f"{k} {time_name(t.median_us)}" for k, t in timings.items())
                self.progress.console.print(
                    f"{case} {size_name(nbytes):>8} us:  {'  '.join(medians)}  [dim]({left})[/]"
                )
        finally:
            self.stop()

    def stop(self) -> None:
        for job in self.jobs.values():
            job.stop()
        self.jobs.clear()


def weight(case: Case, nbytes: int) -> float:
    """How long a row takes, against others: a fixed time, and one that grows with the message."""
    return (1.0 if case.n == 2 else 3.0) + case.n * nbytes / (32 * MIB)


def prepare(names: list[str]) -> Iterator[tuple[str, str]]:
    """Installs every peer that is not there yet; yields those that cannot be, and why."""
    for name in names:
        try:
            with console.status(f"installing {name} into {BENCH_DIR / name} (the first time only)"):
                install(LIBRARIES[name], BENCH_DIR)
        except PeerError as error:
            console.print(f"[red bold]{name} is left out:[/] {escape(str(error))}")
            yield name, str(error)


def chosen_cases(collectives: str, dtypes: str, ranks: str) -> list[Case]:
    """What the options name; without them, what the README promises something about."""
    if not (collectives or dtypes or ranks):
        every = [Case("all_reduce", dtype, n) for n in (2, 4, 8) for dtype in ("f32", "bf16")]
        every += [Case(name, "f32", 2) for name in COLLECTIVES if name != "all_reduce"]
        return sorted(every, key=lambda case: case.n)
    names = parse_names(collectives or "all_reduce", COLLECTIVES, "--collectives")
    types = parse_names(dtypes or "f32", DTYPES, "--dtypes")
    try:
        worlds = [int(n) for n in (ranks or "2").split(",")]
    except ValueError:
        worlds = []
    if not worlds or min(worlds) < 2:
        raise typer.BadParameter(f"--ranks {ranks}: expected numbers from 2 up, such as 2,4")
    return [Case(name, dtype, n) for n in worlds for name in names for dtype in types]


@app.command()
def main(
    collectives: Annotated[str, typer.Option(help=f"Of {', '.join(COLLECTIVES)}.")] = "",
    dtypes: Annotated[str, typer.Option(help="f32, bf16 or both.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "",
    sizes: Annotated[str, typer.Option(help="Message sizes, such as 4,64K,16M.")] = "",
    every: Annotated[int, typer.Option(help="Without --sizes: powers of 4, or of 2.")] = 4,
    libraries: Annotated[str, typer.Option(help="Which libraries.")] = ",".join(LIBRARIES),
    quick: Annotated[bool, typer.Option("--quick", help="Few samples and sizes.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "--json", help="The record; goes on if unfinished.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure all again.")] = False,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Plot: .svg or .png.")] = None,
) -> None:
    """Compare the speed of collectives with the peers on this machine.

    Without options: all_reduce of f32 and bf16 with 2, 4 and 8 ranks, and four other collectives
    with 2; about 25 minutes on 2 cores. A run that was stopped goes on when it is started again.
    Peers are installed into .bench/ when first needed. Examples:

        python benchmarks/compare.py

        python benchmarks/compare.py --quick

        python benchmarks/compare.py --collectives all_gather --ranks 2,4 --sizes 4K,16M

        python benchmarks/compare.py --libraries pycoll,impi --output out.json --plot out.svg
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that `finally` stops the ranks.
    names = parse_names(libraries, LIBRARIES, "--libraries")
    if every not in (2, 4):
        raise typer.BadParameter(f"--every: expected 2 or 4, got {every}")
    some = [parse_size(text) for text in sizes.split(",")] if sizes else []
    if quick and not some:
        some = [4, 16 << 10, 16 * MIB]
    plan = {}
    for case in chosen_cases(collectives, dtypes, ranks):
        largest = (256 if case.n == 2 else 64) * MIB
        plan[case] = sizes_of(case, some, every, largest)

    started_at = datetime.datetime.now(datetime.timezone.utc)
    before = machine()
    facts: dict[str, Any] = {
        "question": {
            "cases": {str(case): chosen for case, chosen in plan.items()},
            "libraries": names,
            "quick": quick,
        },
        "started_at": started_at.isoformat(timespec="seconds"),
        "took_s": 0.0,
        "machine": before,
        "floor": None,
        "libraries": {},
        "notes": {},
        "verdicts": [],
    }
    path = output or ROOT / f"benchmarks/results/compare-{started_at:%Y-%m-%d}.json"
    try:
        record = Record(path, facts) if fresh else Record.open(path, facts)
    except RecordError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        raise typer.Exit(2) from None
    if record.rows:
        console.print(f"going on with {path}: {sum(map(len, record.rows.values()))} rows are there")
    if before["load_average_1m"] > 0.5:
        console.print(
            f"[yellow]load average is {before['load_average_1m']:.1f}:[/] other processes "
            "are busy, so times are rough, above all with more ranks than cores"
        )
    missing = dict(prepare([name for name in names if LIBRARIES[name].packages]))
    record.facts["notes"] |= missing
    floor: Floor | None = None
    try:
        stored = record.facts["floor"]
        floor = Floor.of_record(stored) if stored else measure_floor(BENCH_DIR)
        record.facts["floor"] = floor.as_record()
    except RuntimeError as error:
        console.print(f"[red]no floor:[/] {escape(str(error))}")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    able = [name for name in names if name not in missing]
    with Progress(
        *columns, TextColumn("{task.fields[left]}"), console=console,
        disable=not console.is_terminal, transient=True,
    ) as progress:  # fmt: skip
        run = Run(record, plan, able, QUICK if quick else FULL, floor, progress)
        run.measure()

    record.facts["verdicts"] = verdicts(record.rows)
    record.facts["complete"] = True
    record.save()
    for case, rows in record.rows.items():
        console.print(table(case, rows))
    for entry in record.facts["verdicts"]:
        console.print(verdict_line(entry))
    for what, message in record.facts["notes"].items():
        console.print(f"[yellow]{TITLES.get(what, what)}:[/] {escape(message.splitlines()[0])}")
    draw(record, plot_path or path.with_suffix(".svg"))
    console.print(f"record: {path} ({record.facts['took_s']} s)")
    if not any("pycoll" in row.timings for rows in record.rows.values() for row in rows.values()):
        raise typer.Exit(1)


def draw(record: Record, path: Path) -> None:
    try:
        from plot import plot

        plot(record.rows, path)
        console.print(f"plot: {path}")
    except ImportError:
        console.print("[yellow]no plot:[/] matplotlib is missing; pip install matplotlib")


if __name__ == "__main__":
    app()
