"""`pycoll simulate`: simulated time of algorithms on links of given latency and bandwidth."""

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
from pycoll.cli.simulate_cluster import Request, simulate_cluster
from pycoll.cli.units import (
    format_nbytes,
    format_rate,
    format_seconds,
    parse_nbytes,
    parse_seconds,
    parse_seconds_per_byte,
    parse_sizes,
)
from pycoll.errors import UsageError
from pycoll.schedule.simulation import Simulation

EPILOG = """[bold]Examples[/bold]

  pycoll simulate all_reduce -n 8 --nbytes 1M --alpha 1us --beta 10GB/s --gamma 20GB/s

  pycoll simulate all_reduce -n 8 --nbytes 64M --beta 1e-10s/byte --tile 256K

  pycoll simulate all_reduce --algorithm ring -n 4 --nbytes 1M -o timeline.png

  pycoll simulate --topology examples/topologies/nvlink_hosts.toml --nbytes 1G

  pycoll simulate -t cluster.toml -a ring,hierarchical:host/tree -b 16K:1G:16 --plot times.svg
"""

_CLUSTER_SIZES = "16K:1G:16"  # to plot
_LINK_COSTS = ("alpha", "beta", "gamma")


def simulate(
    context: typer.Context,
    collective: CollectiveArgument = "all_reduce",
    algorithm: AlgorithmsOption = "all",
    n: Annotated[
        int | None,
        typer.Option("-n", help="Number of ranks. Default: 8, or that of the topology.", min=1),
    ] = None,
    nbytes: Annotated[
        str | None,
        typer.Option(
            "--nbytes", "-b", help="Payload: 4, 64K, 16M; with --topology also 16K:1G:16."
        ),
    ] = None,
    alpha: Annotated[str, typer.Option(help="Latency of a link.")] = "1us",
    beta: Annotated[str, typer.Option(help="Bandwidth of a link, or seconds per byte.")] = "10GB/s",
    gamma: Annotated[str, typer.Option(help="Rate of reducing, or seconds per byte.")] = "20GB/s",
    slots: Annotated[int, typer.Option(help="Slots per link.", min=1)] = 8,
    tile: Annotated[
        str | None, typer.Option(help="Cut the payload into tiles of this size. Default: one tile.")
    ] = None,
    root: Annotated[int, typer.Option(help="Root of a rooted collective.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Draw the timeline of the fastest algorithm: .svg or .png."
        ),
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option("--topology", "-t", help="A cluster, described in a TOML file."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="With --topology, draw time by size, and the use of the links: .svg or .png."
        ),
    ] = None,
    module: ModulesOption = None,
) -> None:
    """Simulate schedules in time, without running them; the fastest is first."""
    load_modules(module)
    tile_bytes = None if tile is None else parse_nbytes(tile)
    if topology is not None:
        _refuse_link_costs(context)
        if out is not None:
            raise UsageError("--out draws events of single ranks: use --plot with --topology")
        sizes = parse_sizes(nbytes or (_CLUSTER_SIZES if plot is not None else "1M"))
        request = Request(collective, algorithm, topology, n, sizes, slots, tile_bytes, root, plot)
        return simulate_cluster(request)
    if plot is not None:
        raise UsageError("--plot needs --topology; --out draws a timeline")
    n = 8 if n is None else n
    from pycoll import schedule
    from pycoll.draw import draw_simulation

    size = parse_nbytes(nbytes or "1M")
    costs = parse_seconds(alpha), parse_seconds_per_byte(beta), parse_seconds_per_byte(gamma)
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
        "ports idle",
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
            _idle(simulated, costs[1]),
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


def _idle(simulated: Simulation, beta: float) -> str:
    """Share of the time in which a rank sends nothing, averaged over the ranks."""
    if simulated.time_s <= 0:
        return "-"
    sending_s = sum(simulated.sent_bytes) * beta / len(simulated.sent_bytes)
    return f"{1 - sending_s / simulated.time_s:.0%}"


def _refuse_link_costs(context: typer.Context) -> None:
    for name in _LINK_COSTS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name} and --topology both set the cost of links: pass only one")
