"""`pycoll tune`: measures the fastest choices on this machine, and saves them for later runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pycoll.cli.common import FAILED, console
from pycoll.cli.tune_report import CLOSE, Size, picture, picture_format_of, print_json, print_table
from pycoll.cli.units import format_nbytes, parse_integers, parse_nbytes
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator
    from pycoll.tuning import Effort, Measured

EPILOG = """[bold]Examples[/bold]

  pycoll tune

  pycoll tune -n 2,4 --collectives all_reduce,broadcast --max 64M --check

  pycoll tune --check-only --plot chosen.svg

The table is saved in PYCOLL_CACHE_DIR, else XDG_CACHE_HOME/pycoll, else ~/.cache/pycoll. Later runs
with any number of ranks use it; `pycoll info` shows it. Delete the file to stop using it.
"""

_TIMEOUT_S = 300.0  # for one operation: 8 ranks on 2 cores are slow at 64 MiB
_SWEEPS = 3  # over all sizes, since a machine has slow periods
_AGAIN = 2  # factor of the effort for choices that seem slow

_Asked = tuple[str, str, int]  # collective, arrays, nbytes


def tune(
    n: Annotated[str, typer.Option("-n", help="Numbers of ranks: 2, 2,4 or 2:4.")] = "2",
    collectives: Annotated[
        str,
        typer.Option("--collectives", "-c", help="A list such as all_reduce,broadcast, or all."),
    ] = "all",
    arrays: Annotated[
        str, typer.Option("--arrays", help="plain, mapped (made by comm.empty), or both.")
    ] = "both",
    smallest: Annotated[str, typer.Option("--min", help="Smallest message, bytes.")] = "4",
    largest: Annotated[str, typer.Option("--max", help="Largest message, bytes.")] = "64M",
    factor: Annotated[
        int, typer.Option("--factor", help="Ratio of successive sizes: 2, 4, 8 ...", min=2)
    ] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, 1 MiB at most.")] = False,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Maximum number of rounds per candidate.", min=3)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure again, and check that each choice is the best.")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Only check the current choices.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Plot of chosen and best times: .svg or .png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead.")] = False,
) -> None:
    """Measure every algorithm and protocol on local ranks, and save a table of the fastest.

    Candidates take turns, so that disturbances affect all of them. With --check, new ranks time
    pycoll's own choice among all candidates. A choice that is over 10 % slower than the best is
    measured again, for longer; if it is still slower, the exit status is 1.
    """
    from pycoll import tuning

    effort = tuning.Effort(rounds=7, limit_s=0.5) if quick else tuning.Effort()
    if rounds is not None:
        effort = tuning.Effort(rounds=rounds, limit_s=effort.limit_s * rounds / effort.rounds)
    last = min(parse_nbytes(largest), (1 << 20) if quick else 1 << 62)
    names = _collectives(collectives)
    kinds = tuning.ARRAYS if arrays == "both" else (arrays,)
    if not set(kinds) <= set(tuning.ARRAYS):
        raise UsageError(f"tune: expected --arrays plain, mapped or both, got {arrays!r}")
    picture_format = None if plot is None else picture_format_of(plot)

    shown: list[Size] = []
    for num_ranks in parse_integers(n, "numbers of ranks"):
        if num_ranks < 2:
            raise UsageError("tune: expected -n 2 or more ranks: one rank has nothing to choose")
        asked = [
            (name, kind, nbytes)
            for name in names
            for kind in kinds
            for nbytes in _sizes(name, num_ranks, parse_nbytes(smallest), last, factor)
            if kind == "plain" or tuning.asks_for_arrays(name, nbytes)
        ]
        if not check_only:
            found = _on_ranks(_measure, num_ranks, asked, effort, "measuring")
            _save(num_ranks, [size.measured for size in found])
            if not check:
                shown += _on_ranks(_look, num_ranks, found, effort, "")
        if check or check_only:
            shown += _on_ranks(_check, num_ranks, asked, effort, "checking")

    checked = check or check_only
    if as_json:
        print_json(shown, checked)
    else:
        print_table(shown, checked)
        note = tuning.load()[1]
        typer.echo(f"table: {note}", err=True)
    if plot is not None:
        assert picture_format is not None
        plot.write_bytes(picture(shown, picture_format))
        typer.echo(f"wrote {plot}", err=True)
    if checked and any(size.ratio > CLOSE for size in shown):
        raise typer.Exit(FAILED)


def _collectives(wanted: str) -> list[str]:
    from pycoll import _core, schedule

    rows = [row.name for row in _core.collectives()]
    # A barrier is an all_reduce of one byte.
    known = [name for name in rows if name != "barrier" and schedule.algorithms(name)]
    if wanted == "all":
        return known
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"tune: expected --collectives of {', '.join(known)}, got {name!r}")
    return names


def _sizes(collective: str, n: int, first: int, last: int, factor: int) -> Iterator[int]:
    from pycoll import tuning

    nbytes = first
    while nbytes <= last:
        if nbytes >= tuning.smallest_nbytes(collective, n):
            yield nbytes
        nbytes *= factor


def _on_ranks(
    work: Callable[..., list[Size]], num_ranks: int, items: list, effort: Effort, title: str
) -> list[Size]:
    from pycoll.launch import run_ranks

    title = f"{title} {num_ranks} ranks" if title else ""
    ranks = run_ranks(
        work, num_ranks, items, effort, title, sys.stderr.isatty(), timeout_s=_TIMEOUT_S
    )
    return ranks[0]


# The functions below run on every rank; the result of rank 0 is used.


def _measure(
    comm: Communicator, asked: list[_Asked], effort: Effort, title: str, drawn: bool
) -> list[Size]:
    from pycoll import tuning

    tuning.spread_ranks(comm)
    found: dict[_Asked, Measured] = {}
    with _progress(comm, title, drawn, _SWEEPS * len(asked)) as advance:
        for case in asked * _SWEEPS:
            collective, arrays, nbytes = case
            advance(f"{collective}, {arrays} arrays, {format_nbytes(nbytes)}")
            measured = tuning.measure(comm, collective, nbytes, effort, arrays)
            found[case] = measured.after(found[case]) if case in found else measured
    return [Size(comm.size, measured) for measured in found.values()]


def _look(
    comm: Communicator, found: list[Size], effort: Effort, title: str, drawn: bool
) -> list[Size]:
    return [Size(comm.size, size.measured, _chosen(comm, size.measured)) for size in found]


def _check(
    comm: Communicator, asked: list[_Asked], effort: Effort, title: str, drawn: bool
) -> list[Size]:
    from pycoll import _core, tuning

    tuning.spread_ranks(comm)
    sizes = []
    with _progress(comm, title, drawn, len(asked)) as advance:
        for collective, arrays, nbytes in asked:
            advance(f"{collective}, {arrays} arrays, {format_nbytes(nbytes)}")
            choices = [tuning.AUTO, *_core.choices(collective, nbytes)]
            measured = tuning.measure(comm, collective, nbytes, effort, arrays, choices)
            sizes.append(Size(comm.size, measured, _chosen(comm, measured)))
        # All ranks have the same times, and so agree on the sizes to measure again.
        for idx, size in enumerate(sizes):
            if size.first_ratio <= CLOSE:
                continue
            # Among many candidates, noise always favours one. New times of this one and the choice
            # decide whether it is really faster.
            first = size.measured
            what = f"{first.collective}, {first.arrays} arrays, {format_nbytes(first.nbytes)}"
            advance(f"{what}, again", 0)
            best = first.best()
            more = tuning.measure(
                comm,
                first.collective,
                first.nbytes,
                effort.times(_AGAIN),
                first.arrays,
                [tuning.AUTO, best],
            )
            sizes[idx] = replace(size, again=(best, more.paired(tuning.AUTO, best)))
    return sizes


def _chosen(comm: Communicator, measured: Measured) -> str:
    mapped = measured.arrays == "mapped"
    first_line = comm.explain(measured.collective, measured.nbytes, mapped=mapped).splitlines()[0]
    return first_line.rpartition(": ")[2].partition(" over ")[0]


@contextmanager
def _progress(
    comm: Communicator, title: str, drawn: bool, total: int
) -> Iterator[Callable[..., None]]:
    """A progress bar: advance(label) draws it. No thread draws, since that would occupy a core."""
    start_s = time.monotonic()
    num_begun = 0
    if comm.rank != 0 or not title:
        yield lambda what, steps=1: None
        return
    if not drawn:

        def say(what: str, steps: int = 1) -> None:
            nonlocal num_begun
            num_begun += steps
            passed_s = time.monotonic() - start_s
            line = f"{title}, {passed_s:.0f} s: {what} ({num_begun} of {total})"
            print(line, file=sys.stderr, flush=True)

        yield say
        return
    from rich.progress import Progress

    with Progress(console=console(err=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task(title, total=total)

        def advance(what: str, steps: int = 1) -> None:
            nonlocal num_begun
            num_begun += steps
            done = num_begun - 1
            progress.update(task, completed=done, description=f"{title}: {what}", refresh=True)

        yield advance


def _save(num_ranks: int, found: list[Measured]) -> None:
    from pycoll import _core, tuning

    cores = _core.build_info()["cores"]
    date = tuning.today()
    costs = tuning.fit_costs(found, num_ranks, cores, date)
    rows = [
        _core.TunedSize(m.collective, num_ranks, cores, m.arrays, m.nbytes, date, m.times_s())
        for m in found
    ]
    tuning.save(costs, rows)
