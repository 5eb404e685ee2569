"""`pycoll bench fit`: latency, bandwidth and rate of reducing, from times of ring collectives."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pycoll.cli.common import console, new_table
from pycoll.cli.units import format_nbytes, format_rate, format_seconds, parse_sizes
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.bench.fit import Fit
    from pycoll.bench.record import Row

EPILOG = """[bold]Examples[/bold]

  pycoll bench fit -n 2

  pycoll bench fit -n 4 --sizes 4K:16M:16 --json

  pycoll bench all_reduce -n 4 -a ring --json reduce.json

  pycoll bench all_gather -n 4 -a ring --json gather.json

  pycoll bench fit reduce.json gather.json
"""

_RING = "ring"


def bench_fit(
    records: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of `pycoll bench --json`; without any, ranks measure."),
    ] = None,
    n: Annotated[int, typer.Option("-n", help="Number of ranks that measure.", min=2)] = 2,
    sizes: Annotated[
        str, typer.Option("--sizes", "-b", help="Bytes to measure: 4K,1M or 4K:16M:FACTOR.")
    ] = "4K:4M:4",
    iterations: Annotated[
        int, typer.Option("--iterations", help="Blocks of calls per size, at most.", min=1)
    ] = 20,
    threads: Annotated[
        bool, typer.Option("--threads", help="Run ranks as threads of one process.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Fit alpha, beta and gamma to times of the ring algorithm, with R^2.

    A message takes alpha seconds, a byte that a rank sends beta, and a byte that it reduces gamma.
    The times are those of all_reduce, reduce_scatter and all_gather; records need two of them,
    since one does not tell beta from gamma. R^2 is that of the logarithms of the times.
    """
    from pycoll.bench.fit import fit_links

    rows = _recorded(records) if records else _measured(n, parse_sizes(sizes), iterations, threads)
    ranks = {row.case.num_ranks for row in rows}
    if len(ranks) != 1:
        raise UsageError(f"bench fit: rows of {sorted(ranks)} ranks, expected one number of ranks")
    count = ranks.pop()
    times = [(row.case.collective, row.case.nbytes, row.timing.median_s) for row in rows]
    fit = fit_links(times, count)
    if as_json:
        typer.echo(json.dumps({"ranks": count, "rows": len(rows)} | dataclasses.asdict(fit)))
    else:
        _show(fit, rows, count)


def _recorded(paths: list[Path]) -> list[Row]:
    """The rows of the ring algorithm in some records."""
    from pycoll.bench.fit import COLLECTIVES
    from pycoll.bench.record import Record, RecordError

    rows: list[Row] = []
    for path in paths:
        try:
            rows += Record.load(path).rows.values()
        except RecordError as error:
            raise UsageError(f"bench fit: {error}") from None
    used = [
        row
        for row in rows
        if row.case.library == "pycoll"
        and row.chosen.partition("/")[0] == _RING
        and row.case.collective in COLLECTIVES
    ]
    if not used:
        raise UsageError(
            f"bench fit: none of {len(rows)} rows is of the algorithm ring of "
            f"{', '.join(COLLECTIVES)}: measure with `pycoll bench all_reduce -a ring --json FILE`"
        )
    return used


def _measured(n: int, sizes: list[int], iterations: int, threads: bool) -> list[Row]:
    from pycoll.bench.case import Case
    from pycoll.bench.fit import COLLECTIVES
    from pycoll.bench.measure import Options, measure
    from pycoll.bench.timing import Effort
    from pycoll.launch import run_ranks

    cases = [
        Case.of_size(collective, "f32", n, size, algorithm=_RING)
        for size in sizes
        for collective in COLLECTIVES
    ]
    options = Options(Effort(iterations), pinned=not threads, show_progress=sys.stderr.isatty())
    rows: list[Row] = run_ranks(
        measure, n, list(dict.fromkeys(cases)), options, None, {}, threads=threads
    )[0]
    return rows


def _show(fit: Fit, rows: list[Row], n: int) -> None:
    table = new_table("collective", "size", "measured", "fitted", "fitted / measured")
    for row in rows:
        case, measured_s = row.case, row.timing.median_s
        fitted_s = fit.seconds(case.collective, case.nbytes, n)
        table.add_row(
            case.collective,
            format_nbytes(case.nbytes),
            format_seconds(measured_s),
            format_seconds(fitted_s),
            f"{fitted_s / measured_s:.2f}",
        )
    console().print(table)
    typer.echo(f"alpha  {format_seconds(fit.alpha_s)} for each message")
    for name, cost, what in (
        ("beta", fit.beta_s_per_byte, "sent"),
        ("gamma", fit.gamma_s_per_byte, "reduced"),
    ):
        rate = f", {format_rate(1 / cost)}" if cost > 0 else ": these times do not show any"
        typer.echo(f"{name:<5}  {cost:.3g} s for each byte {what}{rate}")
    typer.echo(f"R^2    {fit.r_squared:.4f}")
