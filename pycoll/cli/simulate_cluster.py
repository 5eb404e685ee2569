"""`pycoll simulate --topology`: collectives on a cluster from a TOML file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pycoll.cli.common import choose_algorithms, console, new_table
from pycoll.cli.units import format_nbytes, format_rate, format_seconds
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.topology import NetworkSimulation, Topology, World

# Algorithms that are simulated by default; others are chosen by name.
USUAL = (
    "ring",
    "tree",
    "halving_doubling",
    "recursive_doubling",
    "halving",
    "binomial",
    "pairwise",
)
COMPOSED = ("all_reduce", "reduce_scatter", "all_gather")
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of the command line."""

    collective: str
    algorithm: str
    topology: Path
    num_ranks: int | None
    sizes: list[int]
    slots: int
    tile_bytes: int | None
    root: int
    plot: Path | None


def simulate_cluster(request: Request) -> None:
    """Simulates, prints a table of times and notes on exactness, and draws."""
    from pycoll import topology

    cluster = topology.load(request.topology)
    if request.num_ranks is not None:
        cluster = cluster.resized(request.num_ranks)
    names = _algorithms(cluster, request.collective, request.algorithm)
    results: dict[str, list[NetworkSimulation]] = {}
    refused: list[tuple[str, Exception]] = []
    began_s = time.monotonic()
    with _progress(len(names) * len(request.sizes)) as step:
        for name in names:
            try:
                results[name] = _simulate_one(cluster, name, request, step)
            except UsageError as error:
                refused.append((name, error))
    title = f"{request.collective} on {cluster.name or request.topology.name}: "
    title += f"{cluster.num_ranks:,} ranks"
    if results:
        _print(list(results.values()), title)
    for name, why in refused:
        typer.echo(f"pycoll: {name}: {why}", err=True)
    if not results:
        raise UsageError("no algorithm could be simulated")
    _say_what_is_exact(list(results.values()), time.monotonic() - began_s)
    if request.plot is not None:
        from pycoll.draw import draw_network

        draw_network([one for row in results.values() for one in row], request.plot, title=title)
        typer.echo(f"wrote {request.plot}", err=True)


def _algorithms(cluster: Topology, collective: str, wanted: str) -> list[str]:
    composed = collective in COMPOSED
    if wanted != "all":
        names = [name.strip() for name in wanted.split(",")]
        plain = [name for name in names if not name.startswith("hierarchical")]
        if plain:
            choose_algorithms(collective, ",".join(plain))
        return names
    from pycoll import schedule

    names = [
        name
        for name in choose_algorithms(collective, "all")
        if name in USUAL or schedule.info(collective, name).sent_fraction is None
    ]
    inner = [level.name for level in cluster.levels[:-1]]
    if composed and inner:
        names.append(f"hierarchical:{inner[0]}")
        if collective == "all_reduce":
            names.append(f"hierarchical:{inner[0]}/tree")
        if len(inner) > 1:
            names.append(f"hierarchical:{'+'.join(inner)}")
    return names


def _prepare(cluster: Topology, name: str, request: Request) -> World:
    """Parses `hierarchical:host+site/tree`: inside hosts, inside sites, a tree between sites."""
    if not name.startswith("hierarchical"):
        return cluster.prepare(request.collective, name, root=request.root)
    described, _, between = name.partition("/")
    head, _, levels = described.partition(":")
    if head != "hierarchical":
        raise UsageError(f"{name!r}: expected hierarchical[:LEVEL+LEVEL][/ALGORITHM]")
    groups = levels.split("+") if levels else None
    return cluster.prepare(
        request.collective, head, root=request.root, groups=groups, between=between or "ring"
    )


def _simulate_one(
    cluster: Topology, name: str, request: Request, step: Callable[[str], Progress]
) -> list[NetworkSimulation]:
    tell = step(f"{name}: classes of ranks")
    world = _prepare(cluster, name, request)
    results = []
    for i, nbytes in enumerate(request.sizes):
        if i:
            tell(1.0)
        tell = step(f"{name}: {format_nbytes(nbytes)}")
        results.append(
            world.simulate(
                nbytes,
                tile_bytes=request.tile_bytes,
                slots=request.slots,
                # Only for the largest payload, where the links limit the time.
                timeline=request.plot is not None and nbytes == max(request.sizes),
                progress=tell,
            )
        )
    tell(1.0)
    return results


@contextmanager
def _progress(num_runs: int) -> Iterator[Callable[[str], Progress]]:
    """A bar on a terminal's stderr; nothing elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = console(err=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=num_runs)
        done = 0.0

        def step(what: str) -> Callable[[float], None]:
            nonlocal done
            bar.update(task, description=what)
            before = done

            def tell(part: float) -> None:
                nonlocal done
                done = max(done, before + part)
                bar.update(task, completed=done)

            return tell

        yield step


def _print(rows: list[list[NetworkSimulation]], title: str) -> None:
    if len(rows[0]) == 1:
        _print_one_size([row[0] for row in rows], title)
        return
    table = new_table("size", *(row[0].algorithm for row in rows), title=title)
    for results in zip(*rows, strict=True):
        best = min(one.time_s for one in results)
        table.add_row(
            format_nbytes(results[0].nbytes),
            *(
                f"[bold]{format_seconds(one.time_s)}[/bold]"
                if one.time_s == best
                else format_seconds(one.time_s)
                for one in results
            ),
        )
    console().print(table)
    _print_one_size([row[-1] for row in rows], f"{format_nbytes(rows[0][-1].nbytes)}:")


def _print_one_size(results: list[NetworkSimulation], title: str) -> None:
    table = new_table(
        "algorithm", "time", "algbw", "busbw", "busiest link", "of it", "classes", title=title
    )
    for one in sorted(results, key=lambda one: one.time_s):
        worst = one.bottleneck
        table.add_row(
            one.algorithm,
            format_seconds(one.time_s),
            format_rate(one.algbw),
            format_rate(one.busbw),
            f"{worst.level}: {worst.busiest}" if worst else "",
            f"{100 * worst.busiest_utilization:.0f} %" if worst else "",
            f"{one.num_classes:,}",
        )
    console().print(table)


def _say_what_is_exact(rows: list[list[NetworkSimulation]], took_s: float) -> None:
    notes = dict.fromkeys(note for row in rows for one in row for note in one.inexact)
    lines = [
        "exact: every message, step, slot and max-min fair share; ranks of a class are identical",
        *(f"not exact: {note}" for note in notes),
        f"simulated in {took_s:.1f} s",
    ]
    typer.echo("\n".join(lines))
