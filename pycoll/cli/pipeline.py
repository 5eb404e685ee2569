"""`pycoll pipeline`: pipeline schedules: bubble, memory, pictures, measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pycoll.cli.common import console, new_table
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.parallel.pipeline import Costs, Schedule, Simulation

EPILOG = """[bold]Examples[/bold]

  pycoll pipeline -p 4 -m 8  # all schedules in one table

  pycoll pipeline --schedule 1f1b -p 4 -m 8 --plot 1f1b.svg

  pycoll pipeline -s zbv -p 4 -m 8 --costs 1,1.2,0.8 --transfer 0.1

  pycoll pipeline -s interleaved_1f1b -v 2 -p 2 -m 4 --actions  # each rank's actions, in order

  pycoll pipeline -s gpipe -p 4 -m 8 --measure  # real ranks, whose stages sleep

  pycoll pipeline --file mine.txt --text  # your own schedule: proved, simulated, drawn
"""


def pipeline(
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", "-s", help="Name of the schedule. Default: a table of all."),
    ] = None,
    p: Annotated[int, typer.Option("-p", help="Number of ranks.", min=1)] = 4,
    m: Annotated[int, typer.Option("-m", help="Number of microbatches.", min=1)] = 8,
    v: Annotated[
        int | None,
        typer.Option("-v", help="Stages per rank. Default: that of the schedule.", min=1),
    ] = None,
    costs: Annotated[
        str, typer.Option(help="Times of F, I and W of a microbatch on one rank; B is I plus W.")
    ] = "1,1,1",
    transfer: Annotated[float, typer.Option(help="Time from one stage to the next.", min=0)] = 0.0,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Your own schedule: a line of actions for each rank."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", "-o", help="Picture to write: .svg, .png or .txt.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the picture as text.")] = False,
    actions: Annotated[
        bool, typer.Option("--actions", help="Print each rank's actions, with transfers.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run it on ranks whose stages sleep. Needs torch.")
    ] = False,
    unit_ms: Annotated[float, typer.Option(help="Milliseconds per unit of time.", min=0.1)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show the cost of a pipeline schedule: bubble, memory, and a timeline."""
    from pycoll.parallel import pipeline as pipelines

    times = _costs(costs, transfer)
    if file is not None:
        if schedule is not None or not file.is_file():
            raise UsageError(f"--file {file}: expected a file that exists, and no --schedule")
        made = pipelines.Schedule.from_text(file.read_text(), file.stem)
        pipelines.validate(made)
    elif schedule is None:
        if plot or text or actions or measure:
            raise UsageError("name a schedule to draw, print or measure: --schedule 1f1b")
        _table(p, m, times, as_json)
        return
    else:
        made = pipelines.build(schedule, p, m, v)
    played = pipelines.simulate(made, times)
    if measure:
        played = _measured(made, times, unit_ms)
    if actions:
        from pycoll.parallel.pipeline.schedules.transfers import with_transfers

        typer.echo(with_transfers(made).text(), nl=False)
    if plot is not None:
        from pycoll.parallel.pipeline.draw_pipeline import draw_pipeline

        draw_pipeline(made, plot, played=played)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        typer.echo(json.dumps(_figures(made, played) | {"measured": measure}))
        return
    from pycoll.parallel.pipeline.draw_pipeline import draw_text, summary

    is_short = (actions or plot is not None) and not text
    typer.echo((summary(made, played) + "\n") if is_short else draw_text(made, played), nl=False)


def _costs(text: str, transfer: float) -> Costs:
    from pycoll.parallel.pipeline import Costs

    try:
        forward, backward_input, backward_weight = map(float, text.split(","))
        if min(forward, backward_input, backward_weight) < 0:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--costs {text}: expected the times of F, I and W, such as 1,1,1"
        ) from None
    return Costs(forward, backward_input, backward_weight, transfer)


def _measured(schedule: Schedule, costs: Costs, unit_ms: float) -> Simulation:
    from pycoll.parallel.pipeline.sleeping import measure

    [found] = measure([schedule], costs, unit_ms / 1e3)
    return found.played


def _figures(schedule: Schedule, played: Simulation) -> dict[str, Any]:
    from pycoll.parallel.pipeline.schedules.actions import Kind
    from pycoll.parallel.pipeline.schedules.transfers import with_transfers

    sends = [
        sum(action.kind in (Kind.SEND_F, Kind.SEND_B) for action in order)
        for order in with_transfers(schedule).orders
    ]
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "stages_per_rank": schedule.stages_per_rank,
        "time": played.time,
        "bubble": played.bubble,
        "idle_share": played.idle_share,
        "live": [peak / schedule.stages_per_rank for peak in played.peak_live],
        "transfers": sends,
    }


def _table(p: int, m: int, costs: Costs, as_json: bool) -> None:
    from pycoll.parallel import pipeline as pipelines

    rows = []
    for name in pipelines.names():
        made = pipelines.build(name, p, m)
        figures = _figures(made, pipelines.simulate(made, costs))
        rows.append(figures | {"summary": pipelines.generator(name).summary})
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = new_table(
        *("schedule", "stages per rank", "time", "bubble %", "idle %", "live", "sends", "what"),
        title=f"{p} ranks, {m} microbatches",
    )
    table.columns[-1].justify = "left"
    table.columns[-1].no_wrap = False
    for row in rows:
        table.add_row(
            row["schedule"],
            str(row["stages_per_rank"]),
            f"{row['time']:g}",
            f"{100 * row['bubble']:.1f}",
            f"{100 * row['idle_share']:.1f}",
            f"{max(row['live']):g}",
            str(max(row["transfers"])),
            row["summary"],
        )
    console().print(table)
    typer.echo(
        "bubble: idle over busy time. live: most microbatches whose activations a rank holds."
    )
