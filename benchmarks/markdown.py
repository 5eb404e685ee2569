"""Prints the tables of README.md and docs/benchmarks.md from a record of compare.py.

python benchmarks/markdown.py benchmarks/results/compare-2026-11-21.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from floor import Floor

LIBRARIES = {
    "pycoll": "pycoll",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "impi": "Intel MPI",
    "gloo": "gloo",
}


def size_name(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(record: dict[str, Any], ranks: int) -> str:
    """Median time of the slowest rank in microseconds, as a Markdown table."""
    names = [name for name in LIBRARIES if name in record["libraries"][str(ranks)]]
    rates = {int(nbytes): rate for nbytes, rate in record["floor"]["read_gb_per_s"].items()}
    floor = Floor(record["floor"]["flight_us"], rates, record["machine"]["cores"])
    head = [f"{ranks} ranks", *(LIBRARIES[name] for name in names)]
    head += ["best / pycoll", "floor / pycoll"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for nbytes, by_library in record["timings"][str(ranks)].items():
        medians = {name: by_library[name]["median_us"] for name in names}
        best = min(us for name, us in medians.items() if name != "pycoll")
        row = [size_name(int(nbytes)), *(number(medians[name]) for name in names)]
        row.append(f"{best / medians['pycoll']:.2f}")
        row.append(f"{floor.all_reduce_us(ranks, int(nbytes)) / medians['pycoll']:.2f}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(
    record: Annotated[Path, typer.Argument(help="A JSON file that compare.py wrote.")],
) -> None:
    """Prints one table per number of ranks."""
    data = json.loads(record.read_text())
    print("\n\n".join(table(data, int(ranks)) for ranks in data["timings"]))


if __name__ == "__main__":
    typer.run(main)
