"""Prints the tables of README.md and docs/benchmarks.md from a record of compare.py.

python benchmarks/markdown.py benchmarks/results/compare-2026-11-21.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from plot import ordered
from record import Case, Record, Rows
from report import (
    MOVERS,
    MPIS,
    OURS,
    TITLES,
    Summary,
    of_floor,
    ratio,
    ratio_name,
    shown_libraries,
    size_name,
    time_name,
)


def table(case: Case, rows: Rows) -> str:
    """Median time of the slowest rank in microseconds, as a Markdown table with its summary."""
    names = shown_libraries(rows)
    ours = [name for name in OURS if name in names]
    head = [f"{case.n} ranks", *(TITLES[name] for name in names)]
    head += [f"best / {TITLES[name]}" for name in ours]
    head += [f"floor / {TITLES[name]}" for name in ours]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for nbytes, row in sorted(rows.items()):
        cells = [size_name(nbytes)]
        cells += [time_name(row.timings[k].median_us) if k in row.timings else "-" for k in names]
        cells += [ratio_name(ratio(row, name)) for name in ours]
        cells += [ratio_name(of_floor(row, name)) for name in ours]
        lines.append("| " + " | ".join(cells) + " |")
    for name in ours:
        summary = Summary.of(rows, name)
        if summary.ratios:
            lines += ["", f"Best peer / {TITLES[name]}: {summary.line()}."]
        of_mpi = Summary.of(rows, name, MPIS)
        if case.collective in MOVERS and of_mpi.ratios != summary.ratios and of_mpi.ratios:
            lines += ["", f"Best MPI / {TITLES[name]}: {of_mpi.line()}."]
    return "\n".join(lines)


def main(
    record: Annotated[Path, typer.Argument(help="A JSON file that compare.py wrote.")],
) -> None:
    """Prints one table per collective, dtype and number of ranks."""
    cases = Record.load(record).rows
    heading = ""
    for case in ordered(cases):
        if heading != (heading := f"### {case.collective}, {case.dtype}\n"):
            print(heading)
        print(table(case, cases[case]) + "\n")


if __name__ == "__main__":
    typer.run(main)
