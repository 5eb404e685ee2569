"""The documents are true: their examples run, their tables and links are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import environment, invoke

import pycoll
from pycoll import _core, schedule

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# ```python runnable, and the ```text output that may follow it
EXAMPLE = re.compile(r"```python runnable\n(.*?)```\n(?:```text output\n(.*?)```)?", re.DOTALL)
EXAMPLES = [
    pytest.param(code, output, id=f"{path.name}-{i}")
    for path in DOCUMENTS
    for i, (code, output) in enumerate(EXAMPLE.findall(path.read_text()))
]


def python(*words: object, cwd: Path = ROOT) -> str:
    """Runs Python and returns its output."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_example_prints_what_the_document_says(code, output, tmp_path):
    assert python("-c", code, cwd=tmp_path) == output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.pure
def test_there_are_examples():
    names = {"README.md-0", "parallel.md-0", "parallel.md-1", "parallel.md-2", "replicas.md-0"}
    names |= {
        "map_reduce.md-0",
        "schedule.md-0",
        "simulation.md-0",
        "hogwild.md-0",
        "planning.md-0",
    }
    assert {param.id for param in EXAMPLES} == names


@pytest.mark.pure
def test_links_paths_and_golden_excerpts_are_of_the_repository():
    """`csrc/...`, `pycoll/...`, `tests/...`: a path in backticks is a path of the repository."""
    folders = "csrc|pycoll|tests|benchmarks|examples|docs"
    wrong = []
    for path in DOCUMENTS:
        text = path.read_text()
        for target in re.findall(r"\]\(([^)#]+)", re.sub(r"(?s)```.*?```", "", text)):
            if "://" not in target and not (path.parent / target).exists():
                wrong.append(f"{path.name} links to {target}")
        for name in re.findall(rf"`((?:{folders})/[\w./*-]+)`", text):
            if not list(ROOT.glob(name.rstrip("/"))):
                wrong.append(f"{path.name} names {name}")
        for name, excerpt in re.findall(r"(?s)```text golden (\S+)\n(.*?)```", text):
            if excerpt not in (ROOT / "tests" / "schedule" / "golden" / name).read_text():
                wrong.append(f"{path.name} has an old excerpt of {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.pure
def test_table_of_algorithms_is_the_registry():
    """Rows, the numbers for 8 ranks, and sources."""
    rows = {
        cells[0]: cells[1:]
        for line in README.splitlines()
        if line.startswith("| `")
        and len(cells := [cell.strip(" `") for cell in line.strip("|").split("|")]) == 6
    }
    builtin = [row.name for row in _core.algorithms() if row.collective == "all_reduce"]
    assert list(rows) == builtin
    n = 8
    for name, (_, num_steps, _, sent, source) in rows.items():
        row = schedule.info("all_reduce", name)
        fractions = [row.sent_fraction(n, rank) for rank in range(n)]
        ends = sorted({f"{end:g}" for end in (min(fractions), max(fractions))})
        assert num_steps == str(schedule.build("all_reduce", name, n).num_steps), name
        assert sent == " .. ".join(ends), name
        assert source == row.source, name


def algorithms_table() -> str:
    """The table of docs/schedule.md, from the registry, for 8 ranks."""
    n = 8
    lines = ["| collective | algorithm | time of N bytes | steps | slots | sent | order | source |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in _core.algorithms():
        s = schedule.build(row.collective, row.name, n)
        fractions = [row.sent_fraction(n, rank) for rank in range(n)]
        sent = " .. ".join(sorted({f"{end:g}" for end in (min(fractions), max(fractions))}))
        slots = s.min_slots()
        has_op = next(c.has_op for c in _core.collectives() if c.name == row.collective)
        order = f"`{s.verify(slots).order}`" if has_op else ""
        cells = [f"`{row.collective}`", f"`{row.name}`", row.cost, str(s.num_steps), str(slots)]
        lines.append(f"| {' | '.join([*cells, sent, order, row.source])} |")
    return "\n".join(lines)


@pytest.mark.pure
def test_table_of_all_algorithms_is_the_registry():
    """PYCOLL_UPDATE_GOLDEN=1 writes it anew, so that a change is read in the diff."""
    path = ROOT / "docs" / "schedule.md"
    marks = re.compile(r"(<!-- algorithms: .*? -->\n)(.*?)(<!-- /algorithms -->)", re.DOTALL)
    expected = algorithms_table() + "\n"
    if os.environ.get("PYCOLL_UPDATE_GOLDEN"):
        path.write_text(marks.sub(lambda m: m[1] + expected + m[3], path.read_text()))
    (found,) = marks.findall(path.read_text())
    assert found[1] == expected


@pytest.mark.pure
def test_table_of_collectives_is_the_cores():
    text = (ROOT / "docs" / "schedule.md").read_text()
    table = text.partition("## Collectives")[2].partition("\n## ")[0]
    rows = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            name, blocks, per_message, _, _, factor = (c.strip(" `") for c in line[1:-1].split("|"))
            rows[name] = blocks, per_message, factor
    assert list(rows) == [row.name for row in _core.collectives()]
    n = 6
    numbers = {"n": n, "n²": n * n, "2n": 2 * n, "(n-1)/n": (n - 1) / n}
    numbers |= {"0": 0, "1": 1, "2": 2, "2(n-1)/n": 2 * (n - 1) / n}
    for row in _core.collectives():
        expected = [row.num_blocks(n), row.blocks_per_payload(n), row.busbw_factor(n)]
        assert [numbers[cell] for cell in rows[row.name]] == pytest.approx(expected), row.name


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("ring.svg", "show ring -n 4 -o"),
        ("simulation.svg", "simulate -t examples/topologies/rails.toml --plot"),
    ],
)
def test_picture_in_the_documents_is_current(name, command, tmp_path, monkeypatch):
    """`pycoll COMMAND docs/images/NAME` draws it anew."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    invoke(*command.split(), str(tmp_path / name))
    words = [
        re.findall(r">([^<]+)</text>", path.read_text())
        for path in (tmp_path / name, ROOT / "docs" / "images" / name)
    ]
    assert words[0] and words[0] == words[1]


@pytest.mark.pure
def test_pre_commit_pins_are_those_of_make_lint():
    pin = re.compile(r'"([\w-]+==[\w.]+)"')
    extra = (ROOT / "pyproject.toml").read_text().partition("lint = [")[2].partition("\n]")[0]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(pin.findall(extra)) == set(pin.findall(hooks)) != set()


def test_benchmark_tables_are_those_of_the_record() -> None:
    # Records whose names say more are of one part, or of another processor.
    record = max((ROOT / "benchmarks" / "results").glob("compare-????-??-??.json"))
    printed = python("benchmarks/markdown.py", record)
    assert printed.strip() in (ROOT / "docs" / "benchmarks.md").read_text()
    readme = (ROOT / "README.md").read_text()
    shown = readme.split("<!-- benchmark table: make bench -->")[1].split("<!-- end of")[0]
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert set(rows) <= set(printed.splitlines())


@pytest.mark.pure
def test_tables_of_hosts_are_those_of_the_record() -> None:
    for names, part in (("hosts-*", "| geometric mean |"), ("collectives-hosts-*", "lowest")):
        record = max((ROOT / "benchmarks" / "results").glob(f"{names}.json"))
        printed = python("benchmarks/hosts.py", "--table", record)
        assert part in printed
        assert printed.strip() in (ROOT / "docs" / "hosts.md").read_text()


def test_readme_errors_read_as_real_ones() -> None:
    line = "comm.all_reduce(np.zeros(4 if comm.rank == 2 else 3, dtype=np.float32))"
    assert line in (ROOT / "README.md").read_text()
    script = compile(line, "mismatch.py", "exec")

    def mismatch(comm: pycoll.Communicator) -> None:
        exec(script, {"comm": comm, "np": np})

    def without_digits(text: str) -> str:
        return re.sub(r"\d+", "#", text)

    readme = without_digits((ROOT / "README.md").read_text())
    errors = pycoll.run_ranks(mismatch, 4, threads=True, return_errors=True)
    assert len(errors) == 4
    for error in errors:
        assert without_digits(f"CollectiveMismatchError: {error}") in readme
