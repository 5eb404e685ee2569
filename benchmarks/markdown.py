"""Prints the tables of README.md and docs/benchmarks.md from a record of compare.py.

python benchmarks/markdown.py benchmarks/results/compare-2026-11-25.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from report import grouped, markdown, ordered

from pycoll.bench.record import Record


def main(
    record: Annotated[Path, typer.Argument(help="A JSON file that compare.py wrote.")],
) -> None:
    """Prints one table per collective, dtype and number of ranks."""
    read = Record.load(record)
    groups, cores = grouped(read), read.facts["machine"]["cores"]
    heading = ""
    for group in ordered(groups):
        rewritten = ", arrays rewritten before each call" * group.rewritten
        if heading != (heading := f"### {group.collective}, {group.dtype}{rewritten}\n"):
            print(heading)
        print(markdown(group, groups[group], cores) + "\n")


if __name__ == "__main__":
    typer.run(main)
