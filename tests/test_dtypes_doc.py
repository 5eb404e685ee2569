"""docs/dtypes.md says what the core answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pycoll import _core

pytestmark = pytest.mark.pure

DOCUMENT = Path(__file__).parents[1] / "docs" / "dtypes.md"
BEGIN, END = "<!-- table: generated -->\n", "<!-- end of table -->\n"


def table() -> str:
    """The table dtypes x ops, as Markdown."""
    ops = _core.ops()
    lines = ["| dtype | bytes | " + " | ".join(ops) + " |", "|---|---|" + ":-:|" * len(ops)]
    for name, _, size in _core.dtypes():
        marks = [" " if _core.why_unsupported(name, op) else "✓" for op in ops]
        lines.append(f"| `{name}` | {size} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


def reasons() -> str:
    """Why the empty cells are empty."""
    seen: dict[str, dict[str, list[str]]] = {}
    for op in _core.ops():
        for name, *_ in _core.dtypes():
            why = _core.why_unsupported(name, op)
            if why:
                dtypes = seen.setdefault(why, {"ops": [], "dtypes": []})
                dtypes["ops"] += [op] * (op not in dtypes["ops"])
                dtypes["dtypes"] += [name] * (name not in dtypes["dtypes"])
    return "".join(
        f"- {', '.join(cells['ops'])} of {', '.join(cells['dtypes'])}: {why}.\n"
        for why, cells in seen.items()
    )


def test_dtypes_document_has_the_table_of_the_core() -> None:
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    current = f"{before}{BEGIN}\n{table()}\nEmpty cells:\n\n{reasons()}\n{END}{after}"
    if os.environ.get("PYCOLL_UPDATE_GOLDEN"):
        DOCUMENT.write_text(current)
    assert text == current, "run again with PYCOLL_UPDATE_GOLDEN=1"
