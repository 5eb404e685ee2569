"""`pycoll show`: a schedule as a picture, as text, or as the programs that ranks execute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pycoll.cli.common import ModulesOption, load_modules

EPILOG = """[bold]Examples[/bold]

  pycoll show ring -n 8 -o ring.svg

  pycoll show halving_doubling -n 4

  pycoll show ring -n 4 --programs

  pycoll show binomial --collective broadcast -n 8 -o broadcast.png
"""


def show(
    algorithm: Annotated[str, typer.Argument(help="Its name; `pycoll info` lists them.")],
    n: Annotated[int, typer.Option("-n", help="Number of ranks.", min=1)] = 4,
    collective: Annotated[
        str, typer.Option("--collective", "-c", help="What it computes.")
    ] = "all_reduce",
    root: Annotated[int, typer.Option(help="Of collectives that have one.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write: .svg, .png or .txt.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the text picture as well.")] = False,
    format: Annotated[
        str | None, typer.Option("--format", help="svg, png, text or ascii. Default: by the file.")
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

    built = schedule.build(collective, algorithm, n, root=root)
    if programs:
        typer.echo(built.explain().rstrip("\n"))
    if out is not None:
        draw_schedule(built, out, title=title, format=format)
        typer.echo(f"wrote {out}", err=True)
    if text or (out is None and not programs):
        shown = format if out is None and format else "text"
        picture = draw_schedule(built, title=title, format=shown)
        typer.echo(picture, nl=False)
