"""`pycoll bench`: measures collectives on local ranks, with the columns of nccl-tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pycoll.cli.common import (
    FAILED,
    CollectiveArgument,
    ModulesOption,
    choose_algorithms,
    console,
    load_modules,
    new_table,
)
from pycoll.cli.units import parse_sizes
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.bench.case import Case
    from pycoll.bench.record import Row

EPILOG = """[bold]Examples[/bold]

  pycoll bench -n 2 --sizes 4:64M

  pycoll bench all_reduce -n 4 --algorithm ring,two_shot --sizes 1K,1M --plot speed.html

  pycoll bench all_reduce --peers --sizes 4:64M:4 --json speed.json --plot speed.png

  pycoll bench broadcast -n 4 --sizes 1M --json -
"""


def bench(
    collective: CollectiveArgument = "all_reduce",
    n: Annotated[int, typer.Option("-n", help="Number of ranks.", min=1)] = 2,
    sizes: Annotated[
        str, typer.Option("--sizes", "-b", help="Bytes: 1M, 4,1K, 4:64M or 4:64M:FACTOR.")
    ] = "4:64M:4",
    algorithm: Annotated[
        str,
        typer.Option("--algorithm", "-a", help="auto, a name, NAME/PROTOCOL, a list, or all."),
    ] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", "-d", help="f32, bf16, i64, ...")] = "f32",
    op: Annotated[str, typer.Option("--op", help="sum, prod, min, max or avg.")] = "sum",
    iterations: Annotated[
        int, typer.Option("--iterations", help="Blocks of calls per size, at most.", min=1)
    ] = 40,
    warmup: Annotated[int, typer.Option("--warmup", help="Untimed calls first.", min=0)] = 10,
    mapped: Annotated[
        bool, typer.Option("--mapped", help="Use arrays of comm.empty, which all ranks map.")
    ] = False,
    threads: Annotated[
        bool, typer.Option("--threads", help="Run ranks as threads of one process.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also measure gloo, if torch is installed.")
    ] = False,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Save results in FILE and resume from it; - prints them."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--plot", "--out", "-o", help="Plot of time and bandwidth: .svg, .png or .html."
        ),
    ] = None,
    module: ModulesOption = None,
) -> None:
    """Measure a collective on local ranks: time, bandwidth, and whether the result is right.

    Calls are timed in blocks of about 2 ms; a call's time is that of its slowest rank. Results are
    checked at every size, outside of the timed calls; the exit status is 1 when an element is
    wrong.
    """
    load_modules(module)
    from pycoll.bench.measure import Options, measure
    from pycoll.bench.record import Record, RecordError, machine
    from pycoll.bench.timing import Effort
    from pycoll.launch import run_ranks

    if out is not None:
        from pycoll.bench.plot import FORMATS
        from pycoll.draw.style import image_format

        image_format(out, None, FORMATS)  # before the ranks start, as all that can be refused
    cases = _cases(collective, algorithm, sizes, dtype, op, n)
    if peers:
        cases = _with_peers(cases, threads)
    question: dict[str, Any] = {
        "ranks": n,
        "threads": threads,
        "iterations": iterations,
        "warmup": warmup,
    }
    question |= {"arrays": "mapped" if mapped else "plain"}
    facts: dict[str, Any] = {"question": question, "machine": machine()}
    printed = json_path is not None and str(json_path) == "-"
    path = None if printed else json_path
    try:
        Record.open(path, facts)
    except RecordError as error:
        raise UsageError(f"--json: {error}") from None
    options = Options(Effort(iterations), warmup, mapped, not threads, sys.stderr.isatty())
    rows = run_ranks(measure, n, cases, options, path, facts, threads=threads)[0]
    if printed:
        record = Record(None, facts)
        record.add(*rows)
        typer.echo(record.to_json())
    else:
        _print_table(rows)
    if out is not None:
        from pycoll.bench.plot import plot

        plot(rows, out)
        typer.echo(f"wrote {out}", err=True)
    if any(row.num_wrong for row in rows):
        raise typer.Exit(FAILED)


def _cases(collective: str, algorithm: str, sizes: str, dtype: str, op: str, n: int) -> list[Case]:
    from pycoll.bench.adapters import numpy_dtype
    from pycoll.bench.case import Case

    names: list[str] = []
    try:
        Case.of_size(collective, dtype, n, 1, op=op)
    except ValueError as error:
        raise UsageError(f"bench: {error}") from None
    numpy_dtype(dtype)  # which may need ml_dtypes
    for name in algorithm.split(","):
        if name == "auto":
            names.append(name)
        elif name == "all":
            names += choose_algorithms(collective, "all")
        else:
            choose_algorithms(collective, name.partition("/")[0])
            names.append(name)
    all_sizes = [1] if collective == "barrier" else parse_sizes(sizes)
    every = (
        Case.of_size(collective, dtype, n, size, op=op, algorithm=name)
        for size in all_sizes
        for name in names
    )
    return list(dict.fromkeys(every))


def _with_peers(cases: list[Case], threads: bool) -> list[Case]:
    """Places each peer's size next to pycoll's, so that a slow period affects both."""
    from dataclasses import replace
    from importlib.util import find_spec

    if threads:
        raise UsageError("bench: --peers needs ranks that are processes: leave --threads out")
    if find_spec("torch") is None:
        raise UsageError("bench: --peers finds none here: pip install torch, for gloo")
    pairs = ((case, replace(case, algorithm="auto", library="gloo")) for case in cases)
    return list(dict.fromkeys(case for pair in pairs for case in pair))


def _print_table(rows: list[Row]) -> None:
    from pycoll.bench.plot import HEADERS, cells, title_of

    table = new_table(*HEADERS, title=title_of(rows))
    for row in rows:
        table.add_row(*cells(row))
    console().print(table)
