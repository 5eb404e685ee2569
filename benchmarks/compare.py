"""Compares pycoll with gloo, DeepSpeed, Open MPI, MPICH and Intel MPI, in one run.

All libraries' ranks are started at once and sleep; each size is measured in several rounds, and in
each round every library has one turn, in shuffled order, while all others sleep. A slow spell of
the machine thus falls on all of them. docs/benchmarks.md says how to read the result.
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
from floor import FLOORS, FloorJob
from jobs import Job, UnsupportedError
from measure import FULL, QUICK, measure_row
from peers import LIBRARIES, PeerError, install
from report import (
    MOVERS,
    TITLES,
    Group,
    Lines,
    grouped,
    markdown,
    time_name,
    us,
    verdict_line,
    verdicts,
)
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pycoll.bench.case import Case
from pycoll.bench.record import Record, RecordError, machine
from pycoll.bench.timing import Effort
from pycoll.cli.units import format_nbytes, parse_sizes
from pycoll.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
BENCH_DIR = ROOT / ".bench"
MIN_NBYTES, MIB = 4, 1 << 20
COLLECTIVES = ("all_reduce", *MOVERS)
USUAL_MOVERS = ("reduce_scatter", "all_gather", "all_to_all", "broadcast")  # without options
DTYPES = ("f32", "bf16")
MOST_FAILURES = 2  # of one library with so many ranks, before it is left out altogether

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=180)  # A log: do not fold the tables.
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def parse_names(text: str, known: Any, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise typer.BadParameter(f"{option}: {', '.join(unknown)} is none of {', '.join(known)}")
    return names


def cases_of(group: Group, sizes: list[int], every: int, largest: int) -> list[Case]:
    """The chosen sizes, or powers; a block of every rank holds at least one element."""
    if not sizes:
        sizes = [MIN_NBYTES * every**i for i in range(28) if MIN_NBYTES * every**i <= largest]
    return sorted(
        {
            Case.of_size(group.collective, group.dtype, group.n, nbytes, rewritten=group.rewritten)
            for nbytes in sizes
        }
    )


@dataclass(slots=True)
class Run:
    """The measuring itself, from message to message."""

    record: Record
    plan: list[Case]
    names: list[str]
    effort: Effort
    progress: Progress
    failures: dict[str, int] = field(default_factory=dict)
    jobs: dict[str, Job | FloorJob] = field(default_factory=dict)

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
            self.failed(name, n, str(error))
        else:
            hello = self.jobs[name].hello[0]
            used = {"version": hello["version"], "versions": hello["versions"]}
            used |= LIBRARIES[name].settings(n)
            self.record.facts["libraries"].setdefault(str(n), {})[name] = used

    def start_floors(self, n: int) -> None:
        """Starts the programs that measure the floors, unless they failed before."""
        for name in FLOORS:
            if f"{name} {n}" not in self.failures:
                try:
                    self.jobs[name] = FloorJob(name, BENCH_DIR)
                except PeerError as error:
                    self.failed(name, n, str(error))

    def left_out(self, name: str, case: Case, error: PeerError | UnsupportedError) -> None:
        """Notes once that a library lacks a case, and each time that it failed."""
        if isinstance(error, UnsupportedError) and name in FLOORS:
            return
        if isinstance(error, PeerError):
            self.failed(name, case.num_ranks, str(error))
            return
        key = f"{name}, {case.collective} {case.dtype}"
        if key not in self.record.facts["notes"]:
            self.note(key, str(error))

    def failed(self, name: str, n: int, error: str) -> None:
        """Notes a failure; a library that has failed twice with n ranks is not started again."""
        key = f"{name} {n}"
        self.failures[key] = self.failures.get(key, 0) + 1
        self.note(f"{key} failed ({self.failures[key]})", error)

    def measure(self) -> None:
        """Measures all messages that the record does not have."""
        weights = {case: weight(case) for case in self.plan}
        there = {case.message for case in self.record.rows}
        todo = [case for case in weights if case.message not in there]
        total, start_s, spent = sum(weights[key] for key in todo), time.monotonic(), 0.0
        before_s = self.record.facts["took_s"]
        task = self.progress.add_task("", total=len(weights), left="")
        self.progress.update(task, completed=len(weights) - len(todo))
        n = 0
        try:
            for case in todo:
                if case.num_ranks != n:
                    self.stop()
                    n = case.num_ranks
                    self.start_floors(n)
                for name in self.names:
                    if name not in self.jobs:
                        self.start(name, n)
                what = f"{Group.of(case)} {format_nbytes(case.nbytes):>8}"
                self.progress.update(task, description=what)
                rows = measure_row(
                    self.jobs, case, self.effort,
                    lambda name, error, case=case: self.left_out(name, case, error),
                )  # fmt: skip
                elapsed_s = time.monotonic() - start_s
                self.record.facts["took_s"] = round(before_s + elapsed_s, 1)
                self.record.add(*rows)
                spent += weights[case]
                left_s = elapsed_s / spent * (total - spent)
                left = (
                    f"about {left_s / 60:.0f} min left" if left_s > 90 else f"{left_s:.0f} s left"
                )
                self.progress.update(task, advance=1, left=left)
                medians = (f"{row.case.library} {time_name(us(row.timing))}" for row in rows)
                self.progress.console.print(f"{what} us:  {'  '.join(medians)}  [dim]({left})[/]")
        finally:
            self.stop()

    def stop(self) -> None:
        for job in self.jobs.values():
            job.stop()
        self.jobs.clear()


def weight(case: Case) -> float:
    """Relative time of a message: a constant, and a part that grows with its size."""
    n = case.num_ranks
    return (1.0 if n == 2 else 3.0) + n * case.nbytes / (32 * MIB)


def prepare(names: list[str]) -> Iterator[tuple[str, str]]:
    """Installs every peer that is not there yet; yields those that cannot be, and why."""
    for name in names:
        try:
            with console.status(f"installing {name} into {BENCH_DIR / name} (the first time only)"):
                install(LIBRARIES[name], BENCH_DIR)
        except PeerError as error:
            console.print(f"[red bold]{name} is left out:[/] {escape(str(error))}")
            yield name, str(error)


def chosen_groups(
    collectives: str, dtypes: str, ranks: str, rewritten: bool = False
) -> list[Group]:
    """The groups that the options name; without collectives and dtypes, those of the README's
    promises."""
    try:
        worlds = [int(n) for n in ranks.split(",")] if ranks else []
    except ValueError:
        worlds = [0]
    if worlds and min(worlds) < 2:
        raise typer.BadParameter(f"--ranks {ranks}: expected numbers from 2 up, such as 2,4")
    if not (collectives or dtypes or rewritten):
        every = [Group("all_reduce", dtype, n) for n in worlds or (2, 4, 8) for dtype in DTYPES]
        every += [Group("all_reduce", "f32", n, rewritten=True) for n in worlds or (2, 4)]
        every += [Group(name, "f32", 2) for name in USUAL_MOVERS if 2 in (worlds or (2,))]
        return sorted(every, key=lambda group: group.n)
    names = parse_names(collectives or "all_reduce", COLLECTIVES, "--collectives")
    types = parse_names(dtypes or "f32", DTYPES, "--dtypes")
    return [
        Group(name, dtype, n, rewritten) for n in worlds or [2] for name in names for dtype in types
    ]


@app.command()
def main(
    collectives: Annotated[str, typer.Option(help=f"Of {', '.join(COLLECTIVES)}.")] = "",
    dtypes: Annotated[str, typer.Option(help="f32, bf16 or both.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "",
    sizes: Annotated[str, typer.Option(help="Message sizes: 4,64K,16M or 4:64M:4.")] = "",
    rewritten: Annotated[bool, typer.Option(help="Arrays are written before each call.")] = False,
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

    Without options: all_reduce of f32 and bf16 with 2, 4 and 8 ranks, of f32 also with arrays that
    are written before each call, and four other collectives with 2 ranks; 25 to 40 minutes on 2
    cores. A run that was stopped goes on when it is started again.
    Peers are installed into .bench/ when first needed. Examples:

        python benchmarks/compare.py

        python benchmarks/compare.py --quick

        python benchmarks/compare.py --collectives all_gather --ranks 2,4 --sizes 4K,16M

        python benchmarks/compare.py --ranks 2 --dtypes f32 --rewritten

        python benchmarks/compare.py --ranks 2

        python benchmarks/compare.py --libraries pycoll,impi --output out.json --plot out.svg
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that `finally` stops the ranks.
    names = parse_names(libraries, LIBRARIES, "--libraries")
    if every not in (2, 4):
        raise typer.BadParameter(f"--every: expected 2 or 4, got {every}")
    try:
        some = parse_sizes(sizes) if sizes else []
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    if quick and not some:
        some = [4, 16 << 10, 16 * MIB]
    plan: list[Case] = []
    for group in chosen_groups(collectives, dtypes, ranks, rewritten):
        plan += cases_of(group, some, every, (256 if group.n == 2 else 64) * MIB)

    started_at = datetime.datetime.now(datetime.timezone.utc)
    before = machine()
    facts: dict[str, Any] = {
        "question": {
            "cases": [f"{Group.of(case)} {case.nbytes}" for case in plan],
            "libraries": names,
            "quick": quick,
        },
        "started_at": started_at.isoformat(timespec="seconds"),
        "took_s": 0.0,
        "machine": before,
        "libraries": {},
        "notes": {},
    }
    path = output or ROOT / f"benchmarks/results/compare-{started_at:%Y-%m-%d}.json"
    try:
        record = Record(path, facts) if fresh else Record.open(path, facts)
    except RecordError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        raise typer.Exit(2) from None
    if record.rows:
        console.print(f"going on with {path}: {len(record.messages())} messages are there")
    if before["load_average_1m"] > 0.5:
        console.print(
            f"[yellow]load average is {before['load_average_1m']:.1f}:[/] other processes "
            "are busy, so times are rough, above all with more ranks than cores"
        )
    missing = dict(prepare([name for name in names if LIBRARIES[name].packages]))
    record.facts["notes"] |= missing
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    able = [name for name in names if name not in missing]
    with Progress(
        *columns, TextColumn("{task.fields[left]}"), console=console,
        disable=not console.is_terminal, transient=True,
    ) as progress:  # fmt: skip
        run = Run(record, plan, able, QUICK if quick else FULL, progress)
        run.measure()

    record.facts["complete"] = True
    record.save()
    groups = grouped(record)
    for group, lines in groups.items():
        console.print(
            f"{group}: median us of the slowest rank\n\n{markdown(group, lines, before['cores'])}\n"
        )
    for entry in verdicts(groups):
        console.print(verdict_line(entry))
    for what, message in record.facts["notes"].items():
        console.print(f"[yellow]{TITLES.get(what, what)}:[/] {escape(message.splitlines()[0])}")
    draw(groups, plot_path or path.with_suffix(".svg"))
    console.print(f"record: {path} ({record.facts['took_s']} s)")
    if not any(case.library == "pycoll" for case in record.rows):
        raise typer.Exit(1)


def draw(groups: dict[Group, Lines], path: Path) -> None:
    from plot import plot

    try:
        plot(groups, path)
        console.print(f"plot: {path}")
    except UsageError as error:
        console.print(f"[yellow]no plot:[/] {escape(str(error))}")


if __name__ == "__main__":
    app()
