"""docs/glossary.md: commands, options, files and functions in the lines to run exist."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from pycoll.cli import app

pytest.importorskip("torch")
pytestmark = [pytest.mark.pure, pytest.mark.torch]

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "glossary.md").read_text()
NAMES = {
    "pc": "pycoll.parallel",
    "laws": "pycoll.parallel.tools.scaling_laws",
    "pycoll": "pycoll",
    "torch": "torch",
    "np": "numpy",
}
CONCEPTS = [
    "synchronous",
    "asynchronous",
    "semi-synchronous",
    "data",
    "model",
    "tensor",
    "pipeline",
    "hybrid",
    "context",
    "expert",
    "parameter",
    "ring",
    "tree",
    "star",
    "all-reduce",
    "gossip",
    "local",
    "MapReduce",
    "HOGWILD",
    "staleness",
    "bubble",
    "speed-up",
    "efficiency",
    "Amdahl's",
    "Gustafson's",
    "Karp-Flatt",
    "strong",
    "weak",
    "alpha-beta",
]


def rows(text: str) -> list[list[str]]:
    """Cells of the tables with a column "Run"."""
    concepts = text.partition("\n## What the notes say")[0]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in concepts.splitlines()]
    return [row for row in cells if len(row) >= 3 and row[0] not in {"Concept", "---"}]


@functools.cache
def commands() -> dict[str, Any]:
    """The commands of `pycoll`, by name."""
    return typer.main.get_command(app).commands  # type: ignore[attr-defined]


def wrong_command(line: str) -> str | None:
    """What is wrong with a command line; None: nothing. It is parsed, not run."""
    program, *words = shlex.split(line)
    missing = [word for word in words if word.endswith(".py") and not (ROOT / word).is_file()]
    if missing:
        return f"no file {missing[0]}"
    if program == "python":
        source = (ROOT / words[0]).read_text()
        unknown = [w for w in words if w.startswith("--") and w != "--help" and w not in source]
        return f"{words[0]} has no {unknown[0]}" if unknown else None
    names = commands()
    count = 2 if " ".join(words[:2]) in names else 1
    name = " ".join(words[:count])
    if program != "pycoll" or name not in names:
        return f"no command {program} {name}"
    try:
        context = names[name].make_context(name, words[count:])
    except Exception as error:  # typer has a copy of click with exceptions of its own
        return f"{type(error).__name__}: {error}"
    script = (context.params.get("command") or [None])[0]
    source = (ROOT / script).read_text() if script and script.endswith(".py") else ""
    options = [w for w in (context.params.get("command") or [])[1:] if w.startswith("--")]
    unknown = [word for word in options if f'"{word}"' not in source]
    if unknown:
        return f"{script} has no {unknown[0]}"
    return wrong_replicas(context.params.get("replicas"))


def wrong_replicas(replicas: str | None) -> str | None:
    from pycoll import UsageError
    from pycoll.parallel.replicas.policy import connect_of

    try:
        connect_of(replicas or "allreduce")
    except UsageError as error:
        return str(error)
    return None


def wrong_python(line: str) -> str | None:
    """A name that does not exist, or arguments that its function does not take."""
    for node in ast.walk(ast.parse(line, mode="eval")):
        if not isinstance(node, ast.Call):
            continue
        try:
            called = object_of(node.func)
        except AttributeError as error:
            return str(error)
        if called is None:
            continue
        given = [None] * len(node.args), {k.arg: None for k in node.keywords if k.arg}
        try:
            inspect.signature(called).bind(*given[0], **given[1])
        except ValueError:  # compiled functions have no signature
            continue
        except TypeError as error:
            return f"{ast.unparse(node.func)}: {error}"
    return None


def object_of(node: ast.expr) -> Any:
    """The object of a dotted name; None: not one of the modules of the page."""
    if isinstance(node, ast.Name):
        return importlib.import_module(NAMES[node.id]) if node.id in NAMES else None
    if not isinstance(node, ast.Attribute):
        return None
    owner = object_of(node.value)
    return None if owner is None else getattr(owner, node.attr)


def wrong_rows(text: str) -> list[str]:
    found = []
    for concept, _, run, *_ in rows(text):
        (line,) = re.fullmatch(r"`([^`]+)`", run).groups()
        shell = line.split()[0] in {"pycoll", "python"}
        wrong = wrong_command(line) if shell else wrong_python(line)
        found += [f"{concept}: {wrong}"] if wrong else []
    return found


def test_every_line_of_the_glossary_exists():
    assert wrong_rows(TEXT) == []
    shown = re.findall(r"`((?:pycoll|python) [^`]+)`", TEXT.partition("\n## What the notes say")[2])
    assert len(shown) >= 4
    assert [wrong for line in shown if (wrong := wrong_command(line))] == []


def test_every_concept_of_the_course_has_a_row():
    names = {word.strip(",:()") for row in rows(TEXT) for word in row[0].split()}
    assert set(CONCEPTS) - names == set()


def test_modes_of_the_glossary_are_rows_of_pycoll_modes():
    from pycoll.parallel.tools import modes

    named = {row[3] for row in rows(TEXT) if len(row) > 3 and row[3]}
    assert named == set(modes._MODES)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("--mesh cp=2 examples/gpt.py", "--mesh cp=2 examples/gone.py", "no file examples/gone.py"),
        ("--mesh cp=2 examples/gpt.py --steps", "-n 2 examples/gpt.py --stops", "has no --stops"),
        ("pycoll doctor", "pycoll doktor", "no command pycoll doktor"),
        ("pycoll pipeline -p 4 -m 8", "pycoll pipeline --ranks 4", "ranks"),
        ("ps:mode=sync,backup=1", "ps:mode=sync,spare=1", "spare"),
        ("laws.amdahl(0.8, 4)", "laws.amdhal(0.8, 4)", "amdhal"),
        ("laws.amdahl(0.8, 4)", "laws.amdahl(0.8, ranks=4)", "ranks"),
    ],
)
def test_lines_that_do_not_exist_are_found(old, new, found):
    assert old in TEXT
    (wrong,) = wrong_rows(TEXT.replace(old, new, 1))
    assert found in wrong
