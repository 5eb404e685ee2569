"""CONTRIBUTING.md: the map names the folders that git tracks, the glossary each term once."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("csrc", "pycoll", "tests", "benchmarks", "docs")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def tracked_folders() -> set[str]:
    """Folders of MAPPED with at least one tracked file directly in them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *MAPPED], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return {f"{PurePosixPath(path).parent}/" for path in listed.split("\0") if path}


def rows_of(text: str) -> list[tuple[str, str]]:
    """Folder and description of each row of the tables under "## Map"."""
    section = text.partition("\n## Map\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+/)` \| (.*) \|$", section, re.MULTILINE)


def problems(text: str, folders: Iterable[str]) -> list[str]:
    rows = rows_of(text)
    named = [folder for folder, _ in rows]
    mapped = {folder for folder in named if folder.split("/")[0] in MAPPED}
    folders = set(folders)
    return [
        *(f"the map does not name {folder}" for folder in sorted(folders - mapped)),
        *(f"the map names {folder}, which has no tracked file" for folder in mapped - folders),
        *(f"the map names {f} more than once" for f in {f for f in named if named.count(f) > 1}),
        *(f"the map does not say what {folder} holds" for folder, what in rows if not what.strip()),
    ]


def test_map_names_every_folder_and_no_other():
    found = problems(CONTRIBUTING, tracked_folders())
    assert not found, "\n".join(found)


def test_map_with_a_missing_row_fails():
    folders = tracked_folders()
    for folder in ("csrc/transport/ring/", "tests/", "docs/decisions/"):
        changed = re.sub(rf"^\| `{folder}` .*\n", "", CONTRIBUTING, flags=re.MULTILINE)
        assert problems(changed, folders) == [f"the map does not name {folder}"]


def test_map_of_a_new_or_deleted_folder_fails():
    folders = tracked_folders()
    assert problems(CONTRIBUTING, folders | {"csrc/gossip/"}) == [
        "the map does not name csrc/gossip/"
    ]
    assert problems(CONTRIBUTING, folders - {"csrc/plan/"}) == [
        "the map names csrc/plan/, which has no tracked file"
    ]


def test_map_with_a_repeated_or_empty_row_fails():
    row = re.search(r"^\| `csrc/plan/` .*\n", CONTRIBUTING, re.MULTILINE)[0]
    repeated = CONTRIBUTING.replace(row, row * 2)
    assert problems(repeated, tracked_folders()) == ["the map names csrc/plan/ more than once"]
    empty = CONTRIBUTING.replace(row, "| `csrc/plan/` |  |\n")
    assert problems(empty, tracked_folders()) == ["the map does not say what csrc/plan/ holds"]


def glossary_problems(text: str) -> list[str]:
    section = text.partition("\n## Glossary\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[1:]
    terms = [term for term, _ in rows]
    found = [f"{term} is there twice" for term in sorted({t for t in terms if terms.count(t) > 1})]
    found += [
        f"{term} is not one sentence" for term, text in rows if text.find(".") != len(text) - 1
    ]
    if len(terms) < 40 or terms != sorted(terms, key=str.casefold):
        found.append(f"{len(terms)} terms, expected 40 or more in alphabetical order")
    return found


def test_glossary_has_each_term_once_in_one_sentence():
    assert glossary_problems(CONTRIBUTING) == []


def test_glossary_with_a_repeated_or_longer_term_fails():
    row = re.search(r"^\| bucket \| .*\n", CONTRIBUTING, re.MULTILINE)[0]
    repeated = CONTRIBUTING.replace(row, row * 2)
    assert glossary_problems(repeated) == ["bucket is there twice"]
    longer = CONTRIBUTING.replace(row, "| bucket | Some gradients. They are reduced together. |\n")
    assert glossary_problems(longer) == ["bucket is not one sentence"]
    moved = CONTRIBUTING.replace(row, "").replace("| algbw |", row + "| algbw |")
    assert len(glossary_problems(moved)) == 1
