"""`pycoll calibrate`: measures this machine for `pycoll plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pycoll.cli.units import format_rate, format_seconds

EPILOG = """[bold]Examples[/bold]

  pycoll calibrate -n 2 -o machine.toml

  pycoll plan train.py --world 2 --cluster machine.toml
"""


def calibrate(
    n: Annotated[int, typer.Option("-n", help="Number of ranks.", min=1)] = 2,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="TOML file of a cluster to write.")
    ] = None,
) -> None:
    """Measure matrix products, memory and collectives, with all ranks working at the same time.

    The result is a cluster of one host with a device; `pycoll plan` and `pycoll flops` read it.
    """
    from pycoll.parallel.planner.calibrate import calibrate as measure
    from pycoll.topology import dumps

    found = measure(n)
    device, level = found.device, found.levels[0]
    assert device is not None
    typer.echo(
        f"a rank: {device.flops_per_s / 1e9:.3g} GFLOP/s, of which a model's block attains "
        f"{device.attained:.0%}; memory "
        f"{format_rate(device.memory_bytes_per_s)}, an operator "
        f"{format_seconds(device.operator_s)}"
    )
    if n > 1:
        typer.echo(
            f"between ranks: latency {format_seconds(level.latency_s)}, "
            f"{format_rate(level.link_bytes_per_s)}"
        )
    if out is not None:
        out.write_text(dumps(found), encoding="utf-8")
        typer.echo(f"wrote {out}", err=True)
