"""`pycoll show`: a schedule as a picture, as text, or as the programs of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pycoll.cli.common import ModulesOption, load_modules
from pycoll.errors import UsageError

EPILOG = """[bold]Examples[/bold]

  pycoll show ring -n 8 -o ring.svg

  pycoll show all_to_all pairwise -n 4

  pycoll show broadcast binomial -n 8 --root 3 -o broadcast.png

  pycoll show reduce_scatter ring -n 4 --programs
"""


def show(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="[COLLECTIVE] ALGORITHM", help="`pycoll info` lists them.", show_default=False
        ),
    ],
    n: Annotated[int, typer.Option("-n", help="Number of ranks.", min=1)] = 4,
    collective: Annotated[
        str | None,
        typer.Option(
            "--collective",
            "-c",
            help="The collective. Default: all_reduce, else the only one with that algorithm.",
            show_default=False,
        ),
    ] = None,
    root: Annotated[int, typer.Option(help="Root of a rooted collective.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write: .svg, .png or .txt.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the text picture as well.")] = False,
    format: Annotated[
        str | None,
        typer.Option("--format", help="svg, png, text or ascii. Default: by the file's ending."),
    ] = None,
    programs: Annotated[
        bool, typer.Option("--programs", help="Print every rank's steps after lowering.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="Title of the picture.")] = None,
    module: ModulesOption = None,
) -> None:
    """Draw a schedule: ranks across, rounds downward, chunks by colour."""
    load_modules(module)
    from pycoll import schedule
    from pycoll.draw import draw_schedule

    built = schedule.build(*_resolve(what, collective), n, root=root)
    if programs:
        typer.echo(built.explain().rstrip("\n"))
    if out is not None:
        draw_schedule(built, out, title=title, format=format)
        typer.echo(f"wrote {out}", err=True)
    if text or (out is None and not programs):
        shown = format if out is None and format else "text"
        picture = draw_schedule(built, title=title, format=shown)
        typer.echo(picture, nl=False)


def _resolve(what: list[str], collective: str | None) -> tuple[str, str]:
    """Resolves one or two words to a collective and an algorithm.

    Raises:
        UsageError: there are more words or none, or the collective is ambiguous.
    """
    from pycoll import _core, schedule

    if len(what) > 2 or (len(what) == 2 and collective not in (None, what[0])):
        raise UsageError(
            f"expected an algorithm, or a collective and its algorithm, got {' '.join(what)!r}"
            + (f" and --collective {collective}" if collective else "")
        )
    if len(what) == 2:
        return what[0], what[1]
    if collective is not None:
        return collective, what[0]
    if (
        what[0] in (row.name for row in _core.collectives())
        and what[0] not in schedule.algorithms()
    ):
        names = ", ".join(schedule.algorithms(what[0])) or "those of all_reduce"
        raise UsageError(f"{what[0]} is a collective: name one of its algorithms, {names}")
    having = [row.name for row in _core.collectives() if what[0] in schedule.algorithms(row.name)]
    if "all_reduce" in having or not having:
        return "all_reduce", what[0]
    if len(having) > 1:
        raise UsageError(
            f"{what[0]} is an algorithm of {', '.join(having)}: name one, as in "
            f"`pycoll show {having[0]} {what[0]}`"
        )
    return having[0], what[0]
