"""What the documents say of the code is so: paths, symbols, constants, commands, lists of files."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from pycoll import _core
from pycoll.cli import app

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
Documents = dict[str, str]  # path in the repository -> text


@functools.cache
def tracked() -> frozenset[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return frozenset(path for path in listed.split("\0") if path and (ROOT / path).exists())


@functools.cache
def read(path: str) -> str:
    return (ROOT / path).read_text()


def documents() -> Documents:
    return {path: read(path) for path in sorted(tracked()) if path.endswith(".md")}


# --- Paths ----------------------------------------------------------------------------------------

ROOMS = "csrc|pycoll|tests|benchmarks|examples|docs"
NAMED_PATH = re.compile(rf"(?<![\w./<>-])(?:{ROOMS})/[\w./*-]*[\w/*]")
# A file in backticks that is named without all of its folders: `fd.h`, `base/fd.h`.
NAMED_FILE = re.compile(rf"`(?!(?:{ROOMS})/)((?:[\w-]+/)*[\w-]+\.(?:h|cc|cuh|cu))`")
ELSEWHERE = {"mpi_abi.h"}  # headers of other projects


def missing_paths(docs: Documents) -> list[str]:
    """Paths anywhere in a text, and C++ files in backticks."""
    files = tracked()
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    ends = {str(PurePosixPath(*PurePosixPath(path).parts[i:])) for path in files for i in range(9)}
    found = []
    for document, text in docs.items():
        for path in NAMED_PATH.findall(text):
            plain = path.rstrip("/")
            there = plain in files or plain in folders or any(ROOT.glob(plain))
            if not there:
                found.append(f"{document} names {path}")
        named = NAMED_FILE.findall(text)
        found += [f"{document} names {name}" for name in named if name not in ends | ELSEWHERE]
    return found


def test_paths_in_documents_exist():
    found = missing_paths(documents())
    assert not found, "\n".join(found)


def test_paths_that_do_not_exist_are_found():
    text = "`csrc/gone/gone.h`, pytest tests/commm -k ring, `gone.cc`, `base/gone.h`"
    docs = {"a.md": text + ", csrc/base/, `fd.h`, `base/fd.h`"}
    assert missing_paths(docs) == [
        "a.md names csrc/gone/gone.h",
        "a.md names tests/commm",
        "a.md names gone.cc",
        "a.md names base/gone.h",
    ]


# --- Links ----------------------------------------------------------------------------------------


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"(?s)```.*?```", "", text), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def broken_anchors(docs: Documents) -> list[str]:
    found = []
    for document, text in docs.items():
        for target, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", text):
            at = str(PurePosixPath(document).parent / target) if target else document
            path = os.path.normpath(at)
            if path not in docs or anchor not in anchors_of(docs[path]):
                found.append(f"{document} links to {target}#{anchor}")
    return found


def test_anchors_in_links_exist():
    found = broken_anchors(documents())
    assert not found, "\n".join(found)


def test_anchors_of_changed_headings_are_found():
    docs = {"docs/a.md": "# `ll`: short\n[b](../b.md#c-d) [a](#ll-short)", "b.md": "## C, d\n"}
    assert broken_anchors(docs) == []
    assert broken_anchors({**docs, "b.md": "## C\n"}) == ["docs/a.md links to ../b.md#c-d"]


# --- Symbols --------------------------------------------------------------------------------------

# `Class::name` (`csrc/...`), `name()` in `csrc/...`, `file`: `name`
SYMBOL_THEN_FILE = re.compile(
    rf"`([A-Za-z_][\w:]*)(?:\(\))?`,?\s(?:\(|in\s|of\s)`((?:{ROOMS})/[\w./]+\.\w+)`"
)


def missing_symbols(docs: Documents) -> list[str]:
    found = []
    for document, text in docs.items():
        for symbol, file in SYMBOL_THEN_FILE.findall(text):
            name = symbol.split("::")[-1]
            if file in tracked() and not re.search(rf"\b{name}\b", read(file)):
                found.append(f"{document} says that {file} has {symbol}")
    return found


def test_symbols_in_documents_are_in_their_files():
    found = missing_symbols(documents())
    assert not found, "\n".join(found)


def test_symbols_that_are_gone_are_found():
    docs = documents()
    pairs = [pair for text in docs.values() for pair in SYMBOL_THEN_FILE.findall(text)]
    assert len(pairs) >= 10
    for symbol, file in pairs[:5]:
        renamed = {"a.md": f"`{symbol}_2` (`{file}`)"}
        assert missing_symbols(renamed) == [f"a.md says that {file} has {symbol}_2"]


# --- Constants ------------------------------------------------------------------------------------

# Document, pattern with one number per group, and for each group the file, name and unit of it.
Constant = tuple[str, str, int]
RANKS: Constant = ("csrc/transport/ring/segment.h", "kMaxRanks", 1)
LOCAL_RANKS: Constant = ("csrc/bootstrap/local/local_group.h", "kMaxLocalRanks", 1)
PEERS: Constant = ("csrc/schedule/step.h", "kMaxPeers", 1)
RECORDS: Constant = ("csrc/transport/ring/records.h", "kNumRecords", 1)
MESSAGE_RECORDS: Constant = ("csrc/transport/ring/message_records.h", "kNumRecords", 1)
SLOTS: Constant = ("csrc/transport/ring/slot.h", "kMaxSlots", 1)
NAP_MS: Constant = ("csrc/executor/wait/wait.cc", "kNapNs", 10**6)
CACHE_KIB: Constant = ("csrc/bindings/arguments/registration_cache.h", "kMinPayload", 1 << 10)


def num_algorithms() -> int:
    return len(_core.algorithms())


def num_collectives() -> int:
    """Those with algorithms: a barrier runs as an all_reduce."""
    return len({row.collective for row in _core.algorithms()})


def num_dtypes() -> int:
    return len(_core.dtypes())


Count = Callable[[], int]
CONSTANTS: list[tuple[str, str, list[Constant | Count]]] = [
    ("CHANGELOG.md", r"(\d+) algorithms for (\d+) collectives", [num_algorithms, num_collectives]),
    ("CHANGELOG.md", r"(\d+) dtypes", [num_dtypes]),
    ("CHANGELOG.md", r"up to (\d+) ranks, (\d+) of them on one host", [RANKS, LOCAL_RANKS]),
    ("CHANGELOG.md", r"The last ([\d,]+)\s+operations", [RECORDS]),
    ("CHANGELOG.md", r"from (\d+) KiB on", [CACHE_KIB]),
    ("README.md", r"from (\d+) KiB on", [CACHE_KIB]),
    ("docs/benchmarks.md", r"from (\d+) KiB on", [CACHE_KIB]),
    ("docs/torch.md", r"[Uu]p to (\d+) ranks in a group", [RANKS]),
    ("docs/hosts.md", r"(\d+) ranks in a communicator, (\d+) of them on one", [RANKS, LOCAL_RANKS]),
    ("docs/schedule.md", r"at\s+most (\d+)\)", [PEERS]),
    ("docs/hangs.md", r"last ([\d,]+) collectives", [RECORDS]),
    ("docs/hangs.md", r"last ([\d,]+) messages", [MESSAGE_RECORDS]),
    ("docs/memory_model.md", r"`kNapNs` \((\d+) ms\)", [NAP_MS]),
    ("docs/memory_model.md", r"A ring has at most (\d+) slots", [SLOTS]),
]


def value_of(constant: Constant | Count) -> int:
    """The constant in units: its definition is a sum, product or shift of whole numbers."""
    if callable(constant):
        return constant()
    file, name, unit = constant
    defined = re.search(rf"\b{name} = ([\d' <*+-]+);", read(file))
    assert defined, f"{file} defines no {name}"
    value = eval(defined[1].replace("'", ""), {"__builtins__": {}})
    assert value % unit == 0
    return value // unit


def wrong_constants(docs: Documents) -> list[str]:
    found = []
    for document, pattern, constants in CONSTANTS:
        matches = list(re.finditer(pattern, docs[document]))
        if not matches:
            found.append(f"{document} does not say {pattern!r}")
        for match in matches:
            said = [int(number.replace(",", "")) for number in match.groups()]
            actual = [value_of(constant) for constant in constants]
            if said != actual:
                found.append(f"{document} says {match[0]!r}; the code has {actual}")
    return found


def test_constants_in_documents_are_those_of_the_code():
    found = wrong_constants(documents())
    assert not found, "\n".join(found)


def test_constants_that_differ_are_found():
    docs = documents()
    for document, pattern, _ in CONSTANTS:
        match = re.search(pattern, docs[document])
        assert match
        start, end = match.span(1)
        changed = docs[document][:start] + "7" + docs[document][end:]
        assert any(document in line for line in wrong_constants({**docs, document: changed}))
        unsaid = docs[document].replace(match[0], "")
        if not re.search(pattern, unsaid):
            assert wrong_constants({**docs, document: unsaid}), pattern


# --- Memory orders --------------------------------------------------------------------------------


def files_with_orders() -> set[str]:
    return {
        path
        for path in tracked()
        if path.startswith("csrc/")
        and PurePosixPath(path).suffix in {".h", ".cc", ".cu", ".cuh"}
        and re.search(r"\bmemory_order_", read(path))
    }


def wrong_orders(text: str, files: set[str]) -> list[str]:
    """Compares the table of docs/memory_model.md, "Where the orders are", with the files."""
    section = text.partition("\n## Where the orders are\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`csrc/.*?) \|", section, re.MULTILINE)
    named = {path for row in rows for path in re.findall(r"`([^`]+)`", row)}
    return sorted(
        [f"docs/memory_model.md does not name {path}" for path in files - named]
        + [
            f"docs/memory_model.md names {path}, which has no memory order"
            for path in named - files
        ]
    )


def test_memory_model_names_the_files_with_memory_orders():
    found = wrong_orders(read("docs/memory_model.md"), files_with_orders())
    assert not found, "\n".join(found)


def test_memory_model_without_a_file_fails():
    text, files = read("docs/memory_model.md"), files_with_orders()
    assert wrong_orders(text, files | {"csrc/base/fd.h"}) == [
        "docs/memory_model.md does not name csrc/base/fd.h"
    ]
    assert wrong_orders(text, files - {"csrc/transport/ring/slot.h"}) == [
        "docs/memory_model.md names csrc/transport/ring/slot.h, which has no memory order"
    ]
    assert len(wrong_orders(text.replace("## Where the orders are", "## Orders"), files)) == len(
        files
    )


# --- Commands -------------------------------------------------------------------------------------


def code_of(text: str) -> str:
    """What is in backticks and in code blocks."""
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`[^`\n]+`", re.sub(r"(?s)```.*?```", "", text))])


def wrong_commands(docs: Documents) -> list[str]:
    """`make TARGET` and `pycoll COMMAND` that do not exist."""
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    found = []
    for document, text in docs.items():
        code = code_of(text)
        found += [
            f"{document} names make {target}"
            for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", code, re.MULTILINE)
            if target not in targets
        ]
        found += [
            f"{document} names pycoll {command}"
            for command in re.findall(r"(?:^|`|\$ )pycoll ([a-z]\w+)", code, re.MULTILINE)
            if command not in commands
        ]
    return found


def test_commands_in_documents_exist():
    found = wrong_commands(documents())
    assert not found, "\n".join(found)


def test_commands_that_do_not_exist_are_found():
    text = "`make tests`, make sure\n```sh\nmake bench\npycoll display ring  # pycoll\n```\n"
    assert wrong_commands({"a.md": text}) == ["a.md names make tests", "a.md names pycoll display"]
