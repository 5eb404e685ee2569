"""`pycoll modes`: modes of parallelism side by side, measured."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from pycoll.cli.common import console, new_table

EPILOG = """[bold]Examples[/bold]

  pycoll modes -n 4

  pycoll modes -n 2 --json
"""


def modes(
    n: Annotated[int, typer.Option("-n", help="Number of ranks.", min=2)] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Run a step of a small model in each mode, and show what a device gets, sends and keeps.

    Nothing of it is looked up: bytes are those that the ranks sent, storage that of their
    parameters, balance that of the multiplications they did.
    """
    from pycoll.parallel.tools.modes import measure

    found = measure(n)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(mode) for mode in found], indent=2))
        return
    table = new_table(
        f"{n} ranks, measured",
        "input per rank",
        "bytes moved / model",
        "/ activation",
        "stored / model",
        "work, max / mean",
    )
    for mode in found:
        table.add_row(
            mode.name,
            f"{mode.input_share:.3g}",
            f"{mode.moved:.3f}",
            f"{mode.activations_moved:.1f}",
            f"{mode.stored:.2f}",
            f"{mode.balance:.2f}",
        )
    console().print(table)
    for mode in found:
        if mode.limit:
            typer.echo(f"  {mode.name}, limit: {mode.limit}")
