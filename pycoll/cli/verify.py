"""`pycoll verify`: which slot counts are proved safe, per algorithm and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from pycoll.cli.common import (
    FAILED,
    AlgorithmsOption,
    CollectiveArgument,
    ModulesOption,
    choose_algorithms,
    console,
    load_modules,
    new_table,
)
from pycoll.cli.units import parse_integers

EPILOG = """[bold]Examples[/bold]

  pycoll verify all_reduce --algorithm all -n 1:17 --slots 1:8

  pycoll verify broadcast -n 2,4,8

  pycoll verify all_reduce --algorithm mine --module my_algos.py
"""


@dataclass(frozen=True, slots=True)
class _Result:
    slots: int | None  # None: not proved
    reason: str = ""


def verify(
    collective: CollectiveArgument = "all_reduce",
    algorithm: AlgorithmsOption = "all",
    n: Annotated[str, typer.Option("-n", help="Ranks: 8, 2,4,8 or 1:17.")] = "1:17",
    slots: Annotated[
        str, typer.Option("--slots", help="Slots per link to try, in the same form as -n.")
    ] = "1:8",
    root: Annotated[int, typer.Option(help="Of collectives that have one.", min=0)] = 0,
    module: ModulesOption = None,
) -> None:
    """Prove lowered schedules: the smallest slot count that is safe. Exit status 1 if one is not.

    Proved is that the goal is reached with one order of reduction on all ranks, that no
    contribution is lost or counted twice, that links stay in order, and that nothing deadlocks.
    """
    load_modules(module)
    names = choose_algorithms(collective, algorithm)
    ranks = parse_integers(n, "rank counts")
    counts = parse_integers(slots, "slot counts")

    from rich.progress import Progress

    results: dict[tuple[str, int], _Result] = {}
    shown = console(err=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task("proving", total=len(names) * len(ranks))
        for name in names:
            for count in ranks:
                progress.update(task, description=f"proving {name}, n={count}")
                results[name, count] = _smallest_safe(collective, name, count, root, counts)
                progress.advance(task)

    table = new_table(
        "algorithm",
        *(f"n={count}" for count in ranks),
        title=f"{collective}: smallest slot count proved safe, of {slots}",
    )
    for name in names:
        cells = (results[name, count].slots for count in ranks)
        table.add_row(name, *("no" if cell is None else str(cell) for cell in cells))
    console().print(table)

    failed = {key: result for key, result in results.items() if result.slots is None}
    for (name, count), result in failed.items():
        typer.echo(f"not proved: {name}, n={count}: {result.reason}")
    typer.echo(f"{len(results) - len(failed)} of {len(results)} proved")
    if failed:
        raise typer.Exit(FAILED)


def _smallest_safe(
    collective: str, algorithm: str, n: int, root: int, counts: list[int]
) -> _Result:
    """Tries slot counts in ascending order; the reason is that of the last one."""
    from pycoll import schedule
    from pycoll.errors import UsageError

    reason = ""
    try:
        built = schedule.build(collective, algorithm, n, root=root)
    except UsageError as error:
        return _Result(None, str(error))
    for slots in counts:
        try:
            return _Result(built.verify(slots=slots).slots)
        except schedule.ScheduleError as error:
            reason = str(error)
    return _Result(None, reason)
