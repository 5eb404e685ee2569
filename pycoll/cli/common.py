"""Shared parts of the commands: one-line errors, algorithms by name, tables, user modules."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pycoll.errors import Error, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FAILED = 1  # exit status: failed, not proved or not equal
USAGE = 2  # exit status: usage error

CollectiveArgument = Annotated[
    str, typer.Argument(help="The collective, such as all_reduce or broadcast.")
]
AlgorithmsOption = Annotated[
    str,
    typer.Option("--algorithm", "-a", help="A name, a list such as ring,tree, or all."),
]
ModulesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--module",
        "-m",
        help="A Python file that registers algorithms. May be given several times.",
    ),
]


def check_script(command: list[str]) -> list[str]:
    """Returns the command, whose first word is the path of a script.

    Raises:
        UsageError: it is Python itself, as mpiexec would have it, or does not exist.
    """
    script = command[0]
    if re.fullmatch(r"python[\d.]*", Path(script).name):
        raise UsageError(
            f"{script}: each rank starts Python by itself, so the script comes first: "
            f"{' '.join(command[1:]) or 'train.py'}"
        )
    if script != "-" and not Path(script).exists():
        raise UsageError(f"{script}: no such file, expected a Python script")
    return command


ScriptArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT [ARGS]...",
        help="The script and its arguments.",
        callback=check_script,
    ),
]


class Commands(TyperGroup):
    """Commands of one or two words; shows an error that the user can act on as one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join(args[:2])
        if name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Error as error:
            typer.echo(f"pycoll: {error}", err=True)
            raise typer.Exit(USAGE if isinstance(error, UsageError) else FAILED) from None


def load_modules(paths: list[Path] | None) -> None:
    """Imports Python files that register algorithms.

    Raises:
        UsageError: a file does not exist, or raises.
    """
    for path in paths or ():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise UsageError(f"--module {path}: expected a Python file that exists")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise UsageError(f"--module {path}: {type(error).__name__}: {error}") from error


def choose_algorithms(collective: str, wanted: str) -> list[str]:
    """Returns the names of algorithms: all of a collective, or those of a list.

    Raises:
        UsageError: no such collective or algorithm.
    """
    from pycoll import schedule

    known = schedule.algorithms(collective)
    if not known:
        raise UsageError(f"{collective} has no algorithm of its own: it uses those of all_reduce")
    chosen = known if wanted == "all" else [name.strip() for name in wanted.split(",")]
    for name in chosen:
        schedule.info(collective, name)
    return chosen


def busbw_factor(collective: str, n: int) -> float:
    """Ratio of a collective's busbw to its algbw, as nccl-tests defines it."""
    from pycoll import _core

    return next(row.busbw_factor(n) for row in _core.collectives() if row.name == collective)


def console(*, err: bool = False) -> Console:
    """A rich Console that does not wrap piped output."""
    from rich.console import Console

    made = Console(stderr=err, highlight=False)
    return made if made.is_terminal else Console(stderr=err, highlight=False, width=250)


def new_table(*headers: str, title: str | None = None) -> Table:
    """A table with names in the first column and numbers in the others."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1))
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", no_wrap=True)
    return table
