"""`pycoll verify`: proves slot counts safe, per algorithm and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pycoll.cli.common import (
    FAILED,
    AlgorithmsOption,
    ModulesOption,
    choose_algorithms,
    console,
    load_modules,
    new_table,
)
from pycoll.cli.units import parse_integers
from pycoll.errors import UsageError

EPILOG = """[bold]Examples[/bold]

  pycoll verify all_reduce --algorithm all -n 1:17 --slots 1:8

  pycoll verify broadcast -n 2,4,8 --root all

  pycoll verify every -n 1:8

  pycoll verify all_reduce --algorithm mine --module my_algos.py
"""


_ORDERS = ("flat", "left_fold", "other")  # most canonical first


@dataclass(frozen=True, slots=True)
class _Result:
    slots: int | None  # None: not proved
    order: str = "flat"
    reason: str = ""


def verify(
    collective: Annotated[
        str, typer.Argument(help="The collective, such as all_reduce or scan; or every.")
    ] = "all_reduce",
    algorithm: AlgorithmsOption = "all",
    n: Annotated[str, typer.Option("-n", help="Ranks: 8, 2,4,8 or 1:17.")] = "1:17",
    slots: Annotated[
        str, typer.Option("--slots", help="Slots per link to try, in the form of -n.")
    ] = "1:8",
    root: Annotated[str, typer.Option(help="Root of rooted collectives: a rank, or all.")] = "0",
    module: ModulesOption = None,
) -> None:
    """Prove lowered schedules, and show the smallest safe slot count. Exit status 1 if one fails.

    The proof shows that every rank reaches its goal with the same order of reduction, that no
    contribution is lost or counted twice, that links stay in order, and that nothing deadlocks.
    Schedules of several blocks are proved both with and without messages that hold several blocks.
    The last column shows the bracketing of reductions: flat, left_fold or other.
    """
    load_modules(module)
    from pycoll import _core, schedule

    counts = parse_integers(slots, "slot counts")
    ranks = parse_integers(n, "rank counts")
    chosen = [collective]
    if collective == "every":
        chosen = [row.name for row in _core.collectives() if schedule.algorithms(row.name)]
    num_cases = 0
    failed: dict[tuple[str, str, int], _Result] = {}
    for name in chosen:
        results = _prove(name, choose_algorithms(name, algorithm), ranks, root, counts)
        _print_table(name, ranks, slots, results)
        num_cases += len(results)
        failed |= {(name, *key): r for key, r in results.items() if r.slots is None}
    for (name, algorithm, count), result in failed.items():
        what = algorithm if len(chosen) == 1 else f"{name} {algorithm}"
        typer.echo(f"not proved: {what}, n={count}: {result.reason}")
    typer.echo(f"{num_cases - len(failed)} of {num_cases} proved")
    if failed:
        raise typer.Exit(FAILED)


def _prove(
    collective: str, names: list[str], ranks: list[int], root: str, counts: list[int]
) -> dict[tuple[str, int], _Result]:
    from rich.progress import Progress

    results = {}
    shown = console(err=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task("proving", total=len(names) * len(ranks))
        for name in names:
            for count in ranks:
                progress.update(task, description=f"proving {collective} {name}, n={count}")
                roots = _roots(collective, root, count)
                found = [_smallest_safe(collective, name, count, r, counts) for r in roots]
                results[name, count] = max(
                    found, key=lambda r: (r.slots is None, r.slots, _ORDERS.index(r.order))
                )
                progress.advance(task)
    return results


def _collective(name: str) -> Any:
    from pycoll import _core

    return next(row for row in _core.collectives() if row.name == name)


def _roots(collective: str, root: str, n: int) -> list[int]:
    if root == "all":
        return list(range(n if _collective(collective).has_root else 1))
    if not root.isdecimal():
        raise UsageError(f"--root {root}: expected the number of a rank, or all")
    return [int(root)]


def _print_table(
    collective: str, ranks: list[int], slots: str, results: dict[tuple[str, int], _Result]
) -> None:
    has_op = _collective(collective).has_op
    table = new_table(
        "algorithm",
        *(f"n={count}" for count in ranks),
        *(["order"] if has_op else []),
        title=f"{collective}: smallest slot count proved safe, of {slots}",
    )
    for name in dict.fromkeys(name for name, _ in results):
        row = [results[name, count] for count in ranks]
        cells = ("no" if result.slots is None else str(result.slots) for result in row)
        order = max((result.order for result in row), key=_ORDERS.index)
        table.add_row(name, *cells, *([order] if has_op else []))
    console().print(table)


def _smallest_safe(
    collective: str, algorithm: str, n: int, root: int, counts: list[int]
) -> _Result:
    """Tries slot counts in ascending order; the reason is that of the last failure."""
    from pycoll import schedule

    reason = ""
    try:
        built = schedule.build(collective, algorithm, n, root=root)
    except UsageError as error:
        return _Result(None, reason=str(error))
    for slots in counts:
        try:
            built.verify(slots=slots, join_blocks=False)
            built.verify(slots=slots, join_chunks=False)
            proof = built.verify(slots=slots)
            return _Result(proof.slots, proof.order)
        except schedule.ScheduleError as error:
            reason = str(error)
    return _Result(None, reason=reason)
