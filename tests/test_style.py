"""Plain English, kept by a test: patterns that a reader has to read twice, and names that are gone.

`python tests/test_style.py [FOLDER ...]` lists what would fail, by file and line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc", "pycoll", "tests", "benchmarks", "docs", "examples")
FILES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("setup.py", "_pycoll_torch.py"),
)
CODE = {".py", ".pyi", ".h", ".cc", ".cu", ".cuh", ".in"}
TEXT = {".md"}

# Sentences that begin so have no subject, or one that is nowhere named.
BEGINNINGS = r"(?:Who|Whose|Whoever|Of)\b (?!course)"
WORDS = (
    r"\b(?:[Nn]obody|[Ss]omebody|[Ww]hoever|[Ww]homever|[Aa]like|[Ss]trangers?|[Cc]omes? again"
    r"|[Hh]as got|[Hh]ave got|[Pp]ump|[Dd]ossier|[Aa]dopter)\b"
)
# A clause whose subject is a bare "who": "what it says to who waits".
CLAUSES = r"(?:; |\b(?:for|to|by|from|with|than|that|of|as|when|where|and|but|so) )who \w"
# Titles of papers and other people's words; a path relative to the repository: the text in it.
EXCEPTIONS: dict[str, tuple[str, ...]] = {}

COMMENT = {
    ".py": re.compile(r"#\s?(.*)"),
    ".pyi": re.compile(r"#\s?(.*)"),
}
CXX_COMMENT = re.compile(r"//[/!]?<?\s?(.*)")


def sentences_start(text: str) -> bool:
    """Whether a sentence of the text begins with one of BEGINNINGS."""
    return bool(re.match(BEGINNINGS, text) or re.search(r"(?<=[.:!?] )" + BEGINNINGS, text))


def prose(path: Path) -> list[tuple[int, str, bool]]:
    """Lines of prose: number, text, and whether the text begins a comment or paragraph.

    In code these are comments, docstrings and texts in quotes; in Markdown all but code blocks.
    """
    lines = path.read_text().splitlines()
    found: list[tuple[int, str, bool]] = []
    if path.suffix in TEXT:
        in_code = False
        for number, line in enumerate(lines, 1):
            if line.lstrip().startswith("```"):
                in_code = not in_code
            elif not in_code:
                stripped = re.sub(r"`[^`]*`", "``", line.strip())
                starts = number == 1 or not lines[number - 2].strip() or line[:1] in "#|-*"
                found.append((number, stripped.lstrip("#|-*> "), starts))
        return found
    is_python = path.suffix in (".py", ".pyi")
    comment = COMMENT.get(path.suffix, CXX_COMMENT)
    in_docstring, was_comment = False, False
    for number, line in enumerate(lines, 1):
        quotes = line.count('"""')
        if is_python and (quotes or in_docstring):
            text = line.strip().strip('"').lstrip('r"')
            begins = (quotes > 0 and not in_docstring) or not lines[number - 2].strip()
            found.append((number, text, begins))
            if quotes % 2:
                in_docstring = not in_docstring
            was_comment = False
            continue
        match = comment.search(line)
        if match and not (is_python and line[: match.start()].count('"') % 2):
            alone = not line[: match.start()].strip()
            found.append((number, match.group(1), not (alone and was_comment)))
            was_comment = alone
        else:
            was_comment = False
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
            found.append((number, text, False))
    return found


def offences(path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    if name in ("tests/test_style.py",):
        return []
    excepted = EXCEPTIONS.get(name, ())
    found = []
    for number, text, begins in prose(path):
        if any(other in text for other in excepted):
            continue
        starts = begins and re.match(BEGINNINGS, text)
        inside = re.search(r"(?<=[.!?] )" + BEGINNINGS, text)
        if starts or inside or re.search(WORDS, text) or re.search(CLAUSES, text):
            found.append(f"{name}:{number}: {text.strip()[:110]}")
    return found


def files(folders: list[str] | None = None) -> list[Path]:
    chosen = folders or [*FOLDERS, *FILES]
    paths: list[Path] = []
    for folder in chosen:
        where = ROOT / folder
        paths += [where] if where.is_file() else sorted(where.rglob("*"))
    return [p for p in paths if p.suffix in CODE | TEXT and p.is_file() and "golden" not in p.parts]


def test_prose_is_plain():
    found = [line for path in files() for line in offences(path)]
    assert not found, f"{len(found)} lines to put in plain English:\n" + "\n".join(found[:40])


def test_prose_that_is_not_plain_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    bad = [
        "// Who waits raises.",
        "/// Of the last exchange; the same on all ranks.",
        '  throw Error("nobody is late");',
        "// A rank waits. Whose thread is gone cannot be joined.",
    ]
    for text in bad:
        (tmp_path / "a.h").write_text(text + "\n")
        assert offences(tmp_path / "a.h"), text
    (tmp_path / "a.h").write_text("// The rank whose buffer is\n// Of course it is.\n")
    assert not offences(tmp_path / "a.h")
    (tmp_path / "a.md").write_text("# Title\n\nStrangers are refused. `nobody` is a user.\n")
    assert len(offences(tmp_path / "a.md")) == 1


if __name__ == "__main__":
    for path in files(sys.argv[1:]):
        print("\n".join(offences(path)), end="\n" if offences(path) else "")
