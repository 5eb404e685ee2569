"""Writes outcomes.jsonl: which of torch's tests pass, at which world size, with which backend.

`python tests/torch_suite/record_outcomes.py gloo` asks Gloo, once for a version of torch, and
chooses the view of each test; `... pycoll` asks pycoll in the same views.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
from suite_client import HERE, WORLD_SIZES, Row, in_a_word, read_table, run_all, write_table
from suite_server import VIEWS, Outcome

LONG_SECONDS = 2.0


def names_of_tests() -> list[str]:
    command = [sys.executable, str(HERE / "suite_server.py"), "--backend", "gloo", "--list"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def note(row: Row, backend: str, world_size: int, outcome: Outcome) -> None:
    row.outcomes.setdefault(backend, {})[str(world_size)] = in_a_word(outcome)
    row.long = row.long or outcome.seconds > LONG_SECONDS


def rank_of_view(row: Row) -> int:
    """How much a view shows: 2 passes somewhere, 1 fails, 0 is skipped everywhere."""
    words = row.outcomes["gloo"].values()
    return 2 if "pass" in words else int(any(not word.startswith("skip") for word in words))


def record_gloo() -> None:
    best: dict[str, Row] = {}
    names = names_of_tests()
    for view in VIEWS:
        rows = {name: Row(name, view) for name in names}
        for world_size in WORLD_SIZES:
            for outcome in run_all("gloo", view, world_size, names):
                note(rows[outcome.name], "gloo", world_size, outcome)
            print(f"gloo as {view} at {world_size} ranks: {len(names)} tests", flush=True)
        for name, row in rows.items():
            if name not in best or rank_of_view(row) > rank_of_view(best[name]):
                best[name] = row
        names = [name for name in names if rank_of_view(best[name]) < 2]
    write_table({"torch": torch.__version__}, sorted(best.values(), key=lambda row: row.test))


def record(backend: str, only: list[str]) -> None:
    head, rows = read_table()
    for view in VIEWS:
        mine = {row.test: row for row in rows if row.view == view and only in ([], [row.test])}
        for world_size in WORLD_SIZES if mine else ():
            for outcome in run_all(backend, view, world_size, list(mine)):
                note(mine[outcome.name], backend, world_size, outcome)
            print(f"{backend} as {view} at {world_size} ranks: {len(mine)} tests", flush=True)
    write_table(head, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend")
    parser.add_argument("--only", nargs=1, default=[], metavar="TEST", help="in its view")
    args = parser.parse_args()
    if args.backend == "gloo" and not args.only:
        record_gloo()
    else:
        record(args.backend, args.only)
