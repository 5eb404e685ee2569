"""Starts servers of torch's tests and asks them; reads and writes the table of outcomes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from suite_server import Outcome

WORLD_SIZES = (2, 3, 4)
HERE = Path(__file__).parent
TABLE = HERE / "outcomes.jsonl"


class Server:
    """Runs tests of one view at one world size, in the order in which they are asked for."""

    def __init__(self, backend: str, view: str, world_size: int) -> None:
        command = [sys.executable, str(HERE / "suite_server.py"), "--backend", backend]
        command += ["--view", view, "--world-size", str(world_size)]
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )
        self.results: dict[str, Outcome] = {}

    def ask(self, names: Iterable[str]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{name}\n" for name in names))
        self.process.stdin.flush()

    def outcome(self, name: str) -> Outcome:
        """Waits for the result of a test that was asked for."""
        assert self.process.stdout is not None
        while name not in self.results:
            line = self.process.stdout.readline()
            assert line, f"the server of torch's tests ended with {self.process.wait()}"
            outcome = Outcome(**json.loads(line))
            self.results[outcome.name] = outcome
        return self.results[name]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@dataclass(slots=True)
class Row:
    """One test: the view it is looked at in, and per backend what came of it at each world size.

    "pass", or "skip: ..." or "fail: ..." with the reason.
    """

    test: str
    view: str
    long: bool = False  # not for the quick tier
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)

    def passes(self, backend: str, world_size: int) -> bool:
        return self.outcomes.get(backend, {}).get(str(world_size)) == "pass"


def read_table() -> tuple[dict, list[Row]]:
    """What the first line says of the run, and the rows."""
    first, *rest = TABLE.read_text().splitlines()
    return json.loads(first), [Row(**json.loads(line)) for line in rest]


def write_table(head: dict, rows: Iterable[Row]) -> None:
    lines = [json.dumps(head), *(json.dumps(asdict(row)) for row in rows)]
    TABLE.write_text("".join(f"{line}\n" for line in lines))


def in_a_word(outcome: Outcome) -> str:
    """ "pass", or what happened and the line that says why, without what differs between runs."""
    if outcome.outcome == "pass":
        return "pass"
    errors = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception|Exit)\b.*)$", outcome.reason, re.M)
    reason = errors[-1] if errors else outcome.reason.strip().partition("\n")[0]
    reason = re.sub(r"(?<![\w:/])/\S+/(?=[\w.]+)|0x[0-9a-f]+", "", reason)
    return f"{outcome.outcome}: {reason[:120]}"


def run_all(backend: str, view: str, world_size: int, names: list[str]) -> Iterator[Outcome]:
    server = Server(backend, view, world_size)
    try:
        server.ask(names)
        for name in names:
            yield server.outcome(name)
    finally:
        server.close()
