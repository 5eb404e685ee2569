"""`pycoll trace`: flight records as a trace over time, and the skew of arrivals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pycoll.cli.common import console, new_table
from pycoll.errors import UsageError

EPILOG = """[bold]Examples[/bold]

  PYCOLL_FLIGHT_DIR=flight pycoll run -n 4 train.py  # each rank writes its record when it fails

  pycoll doctor 4711 --dump flight                   # or the records of a job that hangs

  pycoll trace flight -o trace.json                  # for ui.perfetto.dev or chrome://tracing

  pycoll trace flight --fr-trace fr && python -m torch.distributed.flight_recorder.fr_trace fr
"""


def trace(
    files: Annotated[list[Path], typer.Argument(help="Flight records, or folders of them.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="JSON trace to write, for Perfetto or Chrome."),
    ] = None,
    fr_trace: Annotated[
        Path | None,
        typer.Option("--fr-trace", help="Folder to write pickles to, for torch's fr_trace."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Show the skew of arrivals at each collective, and write a trace of all operations."""
    from pycoll.observe import trace
    from pycoll.parallel.pipeline import trace_events

    flights = trace.read([path for path in files if not path.name.startswith(trace_events.PREFIX)])
    if output is not None:
        content = trace.chrome_trace(flights, trace_events.read(files))
        output.write_text(json.dumps(content) + "\n")
        typer.echo(f"wrote {output}", err=True)
    if fr_trace is not None:
        left_out = trace.write_pickles(flights, fr_trace)
        typer.echo(f"wrote {fr_trace}", err=True)
        for name, count in left_out.items():
            typer.echo(f"fr_trace does not support {name}: left out {count} entries", err=True)
    summary = {group: trace.summary(ranks) for group, ranks in flights.items()}
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
        return
    if not any(summary.values()):
        raise UsageError("nothing to compare: no operation is in the records of two ranks")
    for group, rows in summary.items():
        table = new_table(
            "collective", "operations", "median skew us", "max skew us", "last (times)", title=group
        )
        for row in rows:
            last = ", ".join(f"rank {rank} ({times})" for rank, times in row["last"].items())
            table.add_row(
                row["collective"],
                str(row["operations"]),
                f"{row['median_skew_us']:.1f}",
                f"{row['max_skew_us']:.1f}",
                last,
            )
        console().print(table)
