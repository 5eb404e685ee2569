"""The record of a comparison: a JSON file that grows with every row, and from which a run goes on.

{"question": what is measured, "complete": bool, "machine": {}, "floor": {}, "libraries": {},
 "notes": {}, "verdicts": [],
 "rows": {"all_reduce f32 2": {"4": {"floor_us": 0.1, "timings": {"pycoll": {...}, ...}}}}}
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call by the slowest rank, over all samples of all rounds, in us."""

    median_us: float
    min_us: float
    p99_us: float
    num_samples: int
    calls_per_sample: int

    @staticmethod
    def of(samples_us: list[float], calls_per_sample: int) -> Timing:
        """Sums up samples; p99 is the smallest sample that 99 % of them do not exceed."""
        ordered = sorted(samples_us)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return Timing(statistics.median(ordered), ordered[0], p99, len(ordered), calls_per_sample)


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One table: a collective of a dtype among n ranks."""

    collective: str
    dtype: str
    n: int

    def __str__(self) -> str:
        return f"{self.collective} {self.dtype} {self.n}"

    @staticmethod
    def parse(text: str) -> Case:
        collective, dtype, n = text.split()
        return Case(collective, dtype, int(n))


@dataclass(frozen=True, slots=True)
class Row:
    """One size of a case: the floor, if it was measured, and every library's timing."""

    floor_us: float | None
    timings: dict[str, Timing]


Rows = dict[int, Row]  # By message size in bytes.


class RecordError(Exception):
    """A record that does not fit the run that would go on with it."""


class Record:
    """What has been measured, on disk after every row."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """`facts` are the parts of the file besides the rows; "question" must be among them."""
        self.path = path
        self.facts: dict[str, Any] = {"schema": SCHEMA, "complete": False} | facts
        self.rows: dict[Case, Rows] = {}

    def add(self, case: Case, nbytes: int, row: Row) -> None:
        self.rows.setdefault(case, {})[nbytes] = row
        self.save()

    def has(self, case: Case, nbytes: int) -> bool:
        return nbytes in self.rows.get(case, {})

    def save(self) -> None:
        """Writes the file whole under another name first: a kill never leaves half of it."""
        rows = {
            str(case): {str(nbytes): asdict(row) for nbytes, row in sorted(by_size.items())}
            for case, by_size in self.rows.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".json.new")
        new.write_text(json.dumps(self.facts | {"rows": rows}, indent=1) + "\n")
        os.replace(new, self.path)

    @staticmethod
    def load(path: Path) -> Record:
        """Reads a file.

        Raises:
            RecordError: It is no record of this program.
        """
        try:
            data = json.loads(path.read_text())
            rows = data.pop("rows")
            record = Record(path, data)
            for name, by_size in rows.items():
                record.rows[Case.parse(name)] = {
                    int(nbytes): Row(
                        row["floor_us"],
                        {name: Timing(**timing) for name, timing in row["timings"].items()},
                    )
                    for nbytes, row in by_size.items()
                }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"{path} is no record of a comparison: {error!r}") from error
        return record

    @staticmethod
    def open(path: Path, facts: dict[str, Any]) -> Record:
        """Goes on with an unfinished record of the same question, or begins a new one.

        Raises:
            RecordError: The file is an unfinished record of something else.
        """
        if not path.exists():
            return Record(path, facts)
        record = Record.load(path)
        if record.facts["complete"]:
            return Record(path, facts)
        for what in ("schema", "question", "machine"):
            old, new = record.facts.get(what), ({"schema": SCHEMA} | facts)[what]
            if what == "machine":
                old, new = (same_machine(facts) for facts in (old, new))
            if old != new:
                raise RecordError(
                    f"{path} is an unfinished record with another {what}:\n  there: {old}\n"
                    f"  now:   {new}\nGive another --output, or --fresh to measure all again."
                )
        return record


def same_machine(facts: dict[str, Any]) -> dict[str, Any]:
    """The part of machine() that must not change within one record."""
    return {name: facts.get(name) for name in ("commit", "cpu", "cores", "python")}


def machine() -> dict[str, Any]:
    """What the figures depend on; ask before any rank runs, or the load is one's own."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "..", ":(exclude)results"],
        capture_output=True,
        text=True,
    )
    return {
        "commit": commit.stdout.strip() or None,
        "uncommitted_changes": bool(changed.stdout.strip()),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1m": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
