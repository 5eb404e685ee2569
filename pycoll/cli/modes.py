"""`pycoll modes`: measures and compares modes of parallelism."""

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
    """Run a step of a small model in each mode; show each rank's input, traffic and storage.

    All figures are measured: the bytes that the ranks sent, the storage of their parameters, and
    the balance of the multiplications that they did.
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
