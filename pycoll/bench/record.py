"""The rows that were measured, as a JSON file from which an interrupted run goes on."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pycoll.bench.case import Case
from pycoll.errors import UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """One case on all ranks; times are those of the slowest rank, rates in bytes per second."""

    case: Case
    chosen: str  # the algorithm and protocol, where pycoll chose
    num_ranks: int
    nbytes: int
    median_s: float
    min_s: float
    p99_s: float
    algbw: float  # at the median
    busbw: float
    num_calls: int
    num_wrong: int

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object."""
        flat = asdict(self)
        case = flat.pop("case")
        return case | {"asked_nbytes": case["nbytes"]} | flat

    @staticmethod
    def of_dict(flat: dict[str, Any]) -> Row:
        flat = dict(flat)
        asked = {"nbytes": flat.pop("asked_nbytes")}
        for name in ("collective", "algorithm", "dtype", "op", "library"):
            asked[name] = flat.pop(name)
        return Row(Case(**asked), **flat)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    from pycoll import __version__

    return {
        "cpu": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "pycoll": __version__,
    }


@dataclass(slots=True)
class Record:
    """Rows by case, on disk after each when there is a path."""

    path: Path | None
    question: dict[str, object]
    rows: dict[Case, Row] = field(default_factory=dict)

    def find(self, case: Case) -> Row | None:
        return self.rows.get(case)

    def add(self, row: Row) -> None:
        self.rows[row.case] = row
        if self.path is None:
            return
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(self.to_json() + "\n")
        os.replace(new, self.path)

    def to_json(self) -> str:
        rows = [row.as_dict() for row in self.rows.values()]
        return json.dumps({"machine": machine(), "question": self.question, "rows": rows}, indent=2)

    @staticmethod
    def open(path: Path | None, question: dict[str, object]) -> Record:
        """Goes on with the file, where there is one.

        Raises:
            UsageError: It is about something else, or no such record.
        """
        record = Record(path, question)
        if path is None or not path.exists():
            return record
        try:
            data = json.loads(path.read_text())
            rows = [Row.of_dict(row) for row in data["rows"]]
            there = {"machine": data["machine"], "question": data["question"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--json {path}: no record of pycoll bench: {error!r}") from error
        now = {"machine": machine(), "question": question}
        if there != now:
            raise UsageError(
                f"--json {path} holds another measurement: there {there}, now {now}; "
                "give another file, or delete it"
            )
        record.rows = {row.case: row for row in rows}
        return record
