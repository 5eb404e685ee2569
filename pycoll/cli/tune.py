"""`pycoll tune`: measures what is fastest on this machine, and keeps it for later runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pycoll.cli.common import FAILED, console, new_table
from pycoll.cli.units import format_nbytes, format_seconds, parse_integers, parse_nbytes
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator
    from pycoll.tuning import Effort, Measured

EPILOG = """[bold]Examples[/bold]

  pycoll tune

  pycoll tune -n 2,4 --collectives all_reduce,broadcast --max 64M --check

  pycoll tune --check-only --plot chosen.svg

The table is kept in PYCOLL_CACHE_DIR, else XDG_CACHE_HOME/pycoll, else ~/.cache/pycoll. Later runs
of any number of ranks use it; `pycoll info` says so. Delete the file to be without it.
"""

_TIMEOUT_S = 300.0  # of one operation: 8 ranks on 2 cores need a while for 64 MiB
_CLOSE = 1.10  # within so much of the best is as good as the best


@dataclass(frozen=True, slots=True)
class _Size:
    """One size as it was chosen and measured."""

    num_ranks: int
    measured: Measured
    chosen: str | None  # None: not looked at

    @property
    def ratio(self) -> float:
        assert self.chosen is not None
        return self.measured.behind(self.chosen)


def tune(
    n: Annotated[str, typer.Option("-n", help="Numbers of ranks: 2, 2,4 or 2:4.")] = "2",
    collectives: Annotated[
        str,
        typer.Option("--collectives", "-c", help="A list such as all_reduce,broadcast, or all."),
    ] = "all",
    smallest: Annotated[str, typer.Option("--min", help="Smallest message, bytes.")] = "4",
    largest: Annotated[str, typer.Option("--max", help="Largest message, bytes.")] = "64M",
    factor: Annotated[
        int, typer.Option("--factor", help="From one size to the next: 2, 4, 8 ...", min=2)
    ] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, 1 MiB at most.")] = False,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Of each candidate, at most.", min=3)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Then measure again: is the choice the best?")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Only that, of what is chosen now.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Picture of chosen and best: .svg or .png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead.")] = False,
) -> None:
    """Measure every algorithm and protocol on local ranks, and keep a table of the fastest.

    Candidates take turns, so that what disturbs the machine disturbs all. With --check the exit
    status is 1 when a choice is more than 10 % behind the best one measured.
    """
    from pycoll import tuning

    effort = tuning.Effort(rounds=7, limit_s=1.0) if quick else tuning.Effort()
    if rounds is not None:
        effort = tuning.Effort(rounds=rounds, limit_s=effort.limit_s * rounds / effort.rounds)
    last = min(parse_nbytes(largest), (1 << 20) if quick else 1 << 62)
    names = _collectives(collectives)
    picture_format = None if plot is None else _picture_format(plot)

    shown: list[_Size] = []
    for num_ranks in parse_integers(n, "numbers of ranks"):
        if num_ranks < 2:
            raise UsageError("tune: expected -n 2 or more ranks: one alone has nothing to choose")
        asked = [
            (name, nbytes)
            for name in names
            for nbytes in _sizes(name, num_ranks, parse_nbytes(smallest), last, factor)
        ]
        if not check_only:
            found = _on_ranks(num_ranks, asked, effort, "measuring", look=False)
            _save(num_ranks, found)
            if not check:
                shown += _on_ranks(num_ranks, asked, None, "", look=True, known=found)
        if check or check_only:
            shown += _on_ranks(num_ranks, asked, effort, "checking", look=True)

    checked = check or check_only
    if as_json:
        _print_json(shown, checked)
    else:
        _print_table(shown, checked)
        note = tuning.load()[1]
        typer.echo(f"table: {note}", err=True)
    if plot is not None:
        assert picture_format is not None
        plot.write_bytes(_picture(shown, picture_format))
        typer.echo(f"wrote {plot}", err=True)
    if checked and any(size.ratio > _CLOSE for size in shown):
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


def _picture_format(path: Path) -> str:
    from pycoll.draw.style import image_format, matplotlib_module

    matplotlib_module()
    return image_format(path, None, ("svg", "png"))


def _on_ranks(
    num_ranks: int,
    asked: list[tuple[str, int]],
    effort: Effort | None,
    title: str,
    *,
    look: bool,
    known: list[_Size] | None = None,
) -> list[_Size]:
    from pycoll.launch import run_ranks

    title = f"{title} {num_ranks} ranks" if sys.stderr.isatty() and title else ""
    ranks = run_ranks(
        _rank_main, num_ranks, asked, effort, title, look, known, timeout_s=_TIMEOUT_S
    )
    return ranks[0]


def _rank_main(
    comm: Communicator,
    asked: list[tuple[str, int]],
    effort: Effort | None,
    title: str,
    look: bool,
    known: list[_Size] | None,
) -> list[_Size]:
    """Runs on every rank; `known` sizes are not measured again."""
    from pycoll import tuning

    tuning.spread_ranks(comm)
    sizes = []
    with _progress(title if comm.rank == 0 else "", len(asked)) as advance:
        for i, (collective, nbytes) in enumerate(asked):
            advance(f"{collective}, {format_nbytes(nbytes)}")
            if known is not None:
                measured = known[i].measured
            else:
                assert effort is not None
                measured = tuning.measure(comm, collective, nbytes, effort)
            chosen = None
            if look:
                first_line = comm.explain(collective, measured.nbytes).splitlines()[0]
                chosen = first_line.rpartition(": ")[2].partition(" over ")[0]
            sizes.append(_Size(comm.size, measured, chosen))
    return sizes if comm.rank == 0 else []


@contextmanager
def _progress(title: str, total: int) -> Iterator[Any]:
    """Calls advance(what comes next); drawn only then, because a thread that draws takes a core."""
    if not title:
        yield lambda what: None
        return
    from rich.progress import Progress

    with Progress(console=console(err=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task(title, total=total)
        done = -1

        def advance(what: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=f"{title}: {what}", refresh=True)

        yield advance


def _save(num_ranks: int, found: list[_Size]) -> None:
    from pycoll import _core, tuning

    cores = _core.build_info()["cores"]
    date = tuning.today()
    measured = [size.measured for size in found]
    costs = tuning.fit_costs(measured, num_ranks, cores, date)
    rows = [
        _core.TunedSize(m.collective, num_ranks, cores, m.nbytes, date, m.times_s())
        for m in measured
    ]
    tuning.save(costs, rows)


def _print_table(shown: list[_Size], checked: bool) -> None:
    out = console()
    groups: dict[tuple[str, int], list[_Size]] = {}
    for size in shown:
        groups.setdefault((size.measured.collective, size.num_ranks), []).append(size)
    headers = ("size", "chosen", "time", "best measured", "time", "chosen / best")
    for (collective, n), sizes in groups.items():
        table = new_table(*headers, title=f"{collective}, {n} ranks, f32")
        for size in sizes:
            times = size.measured.times_s()
            best, ratio = next(iter(times)), size.ratio
            table.add_row(
                format_nbytes(size.measured.nbytes),
                size.chosen,
                format_seconds(times[size.chosen or ""]),
                best,
                format_seconds(times[best]),
                f"{ratio:.2f}" + ("  <" if checked and ratio > _CLOSE else ""),
            )
        out.print(table)
    if checked:
        for (collective, n), sizes in groups.items():
            worst = max(sizes, key=lambda size: size.ratio)
            num_close = sum(size.ratio <= _CLOSE for size in sizes)
            out.print(
                f"{collective}, {n} ranks: worst choice {worst.ratio:.2f} x the best, at "
                f"{format_nbytes(worst.measured.nbytes)}; within 10 % at {num_close} of "
                f"{len(sizes)} sizes"
            )


def _print_json(shown: list[_Size], checked: bool) -> None:
    import json

    from pycoll import _core

    rows = [
        {
            "collective": size.measured.collective,
            "num_ranks": size.num_ranks,
            "nbytes": size.measured.nbytes,
            "chosen": size.chosen,
            "ratio": size.ratio,
            "times_s": size.measured.times_s(),
        }
        for size in shown
    ]
    facts = {"machine": _core.machine_fingerprint(), "measured_again": checked, "rows": rows}
    typer.echo(json.dumps(facts, indent=2))


def _picture(shown: list[_Size], picture_format: str) -> bytes:
    from matplotlib.figure import Figure

    from pycoll.draw.style import render

    groups: dict[tuple[str, int], list[_Size]] = {}
    for size in shown:
        groups.setdefault((size.measured.collective, size.num_ranks), []).append(size)
    num_columns = min(3, len(groups))
    num_rows = -(-len(groups) // num_columns)
    fig = Figure(figsize=(5.2 * num_columns, 3.9 * num_rows), layout="constrained")
    axes = list(fig.subplots(num_rows, num_columns, squeeze=False).flat)
    for ax, ((collective, n), sizes) in zip(axes, groups.items(), strict=False):
        choices = sorted({choice for size in sizes for choice in size.measured.rounds_s})
        x = [size.measured.nbytes for size in sizes]
        times = [size.measured.times_s() for size in sizes]
        for choice in choices:
            y = [t[choice] * 1e6 if choice in t else math.nan for t in times]
            ax.plot(x, y, color="0.8", linewidth=0.8)
        best = [min(t.values()) * 1e6 for t in times]
        chosen = [t[size.chosen or ""] * 1e6 for t, size in zip(times, sizes, strict=True)]
        ax.plot([], [], color="0.8", label="all candidates")
        ax.plot(x, chosen, "-", color="C0", linewidth=2, label="chosen")
        ax.plot(x, best, "o", color="C1", markersize=5, markerfacecolor="none", label="best")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(f"{collective}, {n} ranks")
        ax.set_xlabel("message, bytes")
        ax.set_ylabel("time, us")
        ax.grid(True, which="major", alpha=0.3)
        ax.legend(fontsize="small")
    for ax in axes[len(groups) :]:
        ax.set_axis_off()
    return render(fig, picture_format)
