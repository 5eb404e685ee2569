"""`pycoll simulate`: what algorithms would cost on links of given latency and bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pycoll.cli.common import (
    AlgorithmsOption,
    CollectiveArgument,
    ModulesOption,
    busbw_factor,
    choose_algorithms,
    console,
    load_modules,
    new_table,
)
from pycoll.cli.units import (
    format_nbytes,
    format_rate,
    format_seconds,
    parse_nbytes,
    parse_seconds,
    parse_seconds_per_byte,
)
from pycoll.errors import UsageError

EPILOG = """[bold]Examples[/bold]

  pycoll simulate all_reduce -n 8 --nbytes 1M --alpha 1us --beta 10GB/s --gamma 20GB/s

  pycoll simulate all_reduce -n 8 --nbytes 64M --beta 1e-10s/byte --tile 256K

  pycoll simulate all_reduce --algorithm ring -n 4 --nbytes 1M -o timeline.png
"""


def simulate(
    collective: CollectiveArgument = "all_reduce",
    algorithm: AlgorithmsOption = "all",
    n: Annotated[int, typer.Option("-n", help="Number of ranks.", min=1)] = 8,
    nbytes: Annotated[str, typer.Option("--nbytes", "-b", help="Message: 4, 64K, 16M.")] = "1M",
    alpha: Annotated[str, typer.Option(help="Latency of a link.")] = "1us",
    beta: Annotated[str, typer.Option(help="Bandwidth of a link, or seconds per byte.")] = "10GB/s",
    gamma: Annotated[str, typer.Option(help="Rate of reducing, or seconds per byte.")] = "20GB/s",
    slots: Annotated[int, typer.Option(help="Slots per link.", min=1)] = 8,
    tile: Annotated[
        str | None, typer.Option(help="Cut the message into tiles of this size. Default: one tile.")
    ] = None,
    root: Annotated[int, typer.Option(help="Of collectives that have one.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Draw the timeline of the fastest: .svg or .png."),
    ] = None,
    module: ModulesOption = None,
) -> None:
    """Play schedules through in time, without running them: fastest first."""
    load_modules(module)
    from pycoll import schedule
    from pycoll.draw import draw_simulation

    size = parse_nbytes(nbytes)
    costs = parse_seconds(alpha), parse_seconds_per_byte(beta), parse_seconds_per_byte(gamma)
    tile_bytes = None if tile is None else parse_nbytes(tile)
    results, refused = [], []
    for name in choose_algorithms(collective, algorithm):
        try:
            built = schedule.build(collective, name, n, root=root)
            simulated = built.simulate(size, *costs, slots=slots, tile_bytes=tile_bytes)
        except UsageError as error:
            refused.append((name, error))
            continue
        results.append((simulated.time_s, name, built.num_steps, simulated))
    results.sort(key=lambda row: row[:2])

    table = new_table(
        "algorithm",
        "time",
        "algbw",
        "busbw",
        "sent, most",
        "steps",
        title=f"{collective} of {format_nbytes(size)} on {n} ranks: "
        f"alpha {alpha}, beta {beta}, gamma {gamma}, {slots} slots",
    )
    factor = busbw_factor(collective, n)
    for time_s, name, num_steps, simulated in results:
        algbw = size / time_s if time_s > 0 else 0.0
        table.add_row(
            name,
            format_seconds(time_s),
            format_rate(algbw),
            format_rate(algbw * factor),
            format_nbytes(max(simulated.sent_bytes)),
            str(num_steps),
        )
    console().print(table)
    for name, why in refused:
        typer.echo(f"pycoll: {name}: {why}", err=True)
    if not results:
        raise UsageError("no algorithm could be simulated")
    if out is not None:
        time_s, name, _, simulated = results[0]
        title = f"{name} {collective}, {format_nbytes(size)}, {n} ranks: {format_seconds(time_s)}"
        draw_simulation(simulated, out, title=title)
        typer.echo(f"wrote {out}: {name}", err=True)
