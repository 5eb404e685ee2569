"""The record of a measurement: JSON with one line for each fact and each message.

A row is one case of one library; the rows of a message lie on one line. An interrupted run goes on
from its record.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pycoll.bench.case import Case, Message
from pycoll.bench.timing import Timing

SCHEMA = 3
_CASE_FIELDS = [field.name for field in fields(Case)]
_TIMING_FIELDS = [field.name for field in fields(Timing)]


class RecordError(Exception):
    """A file that is no record, or one of another question."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case on all ranks.

    Attributes:
        case: The measured case.
        timing: Times of a call by the slowest rank.
        chosen: Algorithm and protocol, where the library says which it chose.
        num_wrong: Wrong elements on all ranks; None: not checked.
    """

    case: Case
    timing: Timing
    chosen: str = ""
    num_wrong: int | None = None

    @property
    def algbw(self) -> float:
        """Bytes per second at the median."""
        return self.case.algbw(self.timing.median_s)

    @property
    def busbw(self) -> float:
        return self.case.busbw(self.timing.median_s)

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object."""
        times = {
            name: float(f"{value:.12g}") if isinstance(value, float) else value
            for name, value in asdict(self.timing).items()
        }
        rates = {"algbw": round(self.algbw), "busbw": round(self.busbw)}
        more = {"chosen": self.chosen, "num_wrong": self.num_wrong}
        return asdict(self.case) | times | rates | more

    @staticmethod
    def of_dict(flat: dict[str, Any]) -> Row:
        """The rates follow from the rest; what an older record lacks has its default."""
        return Row(
            Case(**{name: flat[name] for name in _CASE_FIELDS if name in flat}),
            Timing(**{name: flat[name] for name in _TIMING_FIELDS}),
            flat["chosen"],
            flat["num_wrong"],
        )


class Record:
    """Rows by case and facts by name; on disk after each `add` when there is a path."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts: dict[str, Any] = {"schema": SCHEMA, "complete": False} | facts
        self.rows: dict[Case, Row] = {}

    def find(self, case: Case) -> Row | None:
        return self.rows.get(case)

    def add(self, *rows: Row) -> None:
        self.rows |= {row.case: row for row in rows}
        self.save()

    def messages(self) -> list[list[Row]]:
        """The rows of each message, in the order in which messages were first measured."""
        order = {message: i for i, message in reversed(list(enumerate(map(_message, self.rows))))}
        ordered = sorted(self.rows.values(), key=lambda row: order[row.case.message])
        return [list(rows) for _, rows in groupby(ordered, key=lambda row: row.case.message)]

    def to_json(self) -> str:
        facts = [f"{json.dumps(name)}: {json.dumps(fact)}" for name, fact in self.facts.items()]
        lines = [", ".join(json.dumps(row.as_dict()) for row in rows) for rows in self.messages()]
        rows = '"rows": [' + ",".join(f"\n{line}" for line in lines) + "\n]"
        return "{" + ",\n".join([*facts, rows]) + "}"

    def save(self) -> None:
        """Writes another file and renames it: a kill never leaves half a record."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(self.to_json() + "\n")
        os.replace(new, self.path)

    @staticmethod
    def load(path: Path) -> Record:
        """Reads a file.

        Raises:
            RecordError: It is no record.
        """
        try:
            data = json.loads(path.read_text())
            rows = [Row.of_dict(row) for row in data.pop("rows")]
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"{path} is no record of a measurement: {error!r}") from error
        record = Record(path, data)
        record.rows = {row.case: row for row in rows}
        return record

    @staticmethod
    def open(path: Path | None, facts: dict[str, Any]) -> Record:
        """Goes on with an unfinished record of the same question, or begins a new one.

        Raises:
            RecordError: The file is an unfinished record of another question or machine.
        """
        if path is None or not path.exists():
            return Record(path, facts)
        record = Record.load(path)
        if record.facts["complete"]:
            return Record(path, facts)
        for what in ("question", "machine"):
            old, new = record.facts.get(what), facts.get(what)
            if what == "machine":
                old, new = _same_machine(old or {}), _same_machine(new or {})
            if old != new:
                raise RecordError(
                    f"{path} is an unfinished record of another measurement. Its {what}: {old}; "
                    f"now: {new}. Give another file, or delete it."
                )
        return record


def _message(case: Case) -> Message:
    return case.message


def by_library(rows: Iterable[Row]) -> dict[str, Timing]:
    """The timings of one message."""
    return {row.case.library: row.timing for row in rows}


def _same_machine(facts: dict[str, Any]) -> dict[str, Any]:
    """The part of machine() that must not change within one record."""
    return {name: facts.get(name) for name in ("commit", "cpu", "cores", "python")}


def write_results(path: Path, results: Iterable[Any], **facts: Any) -> None:
    """Writes results that are no Rows: a line for each.

    Args:
        path: The file.
        results: Dataclasses, or dicts.
        facts: What holds for all of them, beside the machine.
    """
    dicts = [asdict(one) if is_dataclass(one) else one for one in results]  # type: ignore[arg-type]
    lines = ",\n".join(map(json.dumps, dicts))
    about = json.dumps({"machine": machine(), **facts})
    path.write_text(f'{about[:-1]},\n"results": [\n{lines}\n]}}\n')


def machine() -> dict[str, Any]:
    """The machine, on which all figures depend. The load is read before any rank runs."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        **_commit(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1m": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _commit() -> dict[str, Any]:
    """The commit of a checkout, and whether it has other changes than results."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return {"commit": None, "uncommitted_changes": False}
    git = ["git", "-C", str(root)]
    changes = ["status", "--porcelain", "--", ".", ":(exclude)benchmarks/results"]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, *changes], capture_output=True, text=True)
    except OSError:
        return {"commit": None, "uncommitted_changes": False}
    return {
        "commit": commit.stdout.strip() or None,
        "uncommitted_changes": bool(changed.stdout.strip()),
    }
