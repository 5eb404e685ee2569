"""The command line: what it prints, what it writes, and with which status it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment, invoke, run

import pycoll
from pycoll import UsageError, _core, schedule
from pycoll.cli.units import (
    format_nbytes,
    format_rate,
    format_seconds,
    parse_integers,
    parse_nbytes,
    parse_seconds,
    parse_seconds_per_byte,
    parse_sizes,
)

pytestmark = pytest.mark.pure

COMMANDS = (
    *("show", "verify", "simulate", "run", "bench", "info"),
    *("plan", "flops", "calibrate"),
)
MY_ALGORITHM = """
from pycoll.schedule import copy, reduce, register

@register("all_reduce", "my_star", num_chunks=1)
def my_star(n, root):
    for rank in range(1, n):
        yield reduce(0, 0, src=rank, dst=0)
        yield copy(1, 0, src=0, dst=rank)
"""
LOSES_RANK_1 = """
from pycoll.schedule import copy, reduce, register

@register("all_reduce", "loses_rank_1", num_chunks=1)
def loses_rank_1(n, root):
    for rank in range(2, n):
        yield reduce(0, 0, src=rank, dst=0)
    for rank in range(1, n):
        yield copy(1, 0, src=0, dst=rank)
"""


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


# Help and errors.


def test_help_of_every_command_has_examples():
    for command in COMMANDS:
        text = invoke(command, "--help")
        assert "Examples" in text and f"pycoll {command}" in text, command


def test_help_breaks_lines_where_the_terminal_ends():
    """And not where the source does, too."""
    assert "differs, in the order of computation" in invoke("check", "--help")


def test_help_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys; from typer.testing import CliRunner; from pycoll.cli import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "sys.exit(not {'torch', 'matplotlib'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=60)


WRONG = [
    ("show no_such", "no_such"),
    ("show ring -o ring.gif", "gif"),
    ("verify no_such", "no collective"),
    ("verify -n 3:1", "'3:1' is not a list of rank counts"),
    ("simulate --nbytes many", "'many' is not a size"),
    ("simulate --beta fast", "'fast' is not a rate"),
    ("verify --module no_such.py", "no_such.py"),
    ("bench --dtype f8", "--dtype"),
]


def test_wrong_use_is_one_line_and_status_2():
    outputs = [(invoke(*words.split(), status=2), message) for words, message in WRONG]
    outputs.append((run(*WRONG[0][0].split(), status=2)[1], WRONG[0][1]))  # in its own process
    for output, message in outputs:
        assert message in output and output.startswith("pycoll: "), output
        assert output.count("\n") == 1, output


# Pictures, proofs, simulations.


def test_show_prints_the_text_picture_or_the_programs_or_writes_a_file(tmp_path: Path):
    pytest.importorskip("matplotlib")
    built = schedule.build("all_reduce", "ring", 4)
    assert invoke("show", "ring", "-n", "4") == built.draw()
    assert invoke("show", "ring", "-n", "4", "--programs").strip() == built.explain().strip()
    for name, start in (("ring.svg", b"<?xml"), ("ring.png", b"\x89PNG")):
        invoke("show", "ring", "-n", "4", "-o", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(start)


def test_show_root_of_a_broadcast_is_drawn():
    text = invoke("show", "star", "-c", "broadcast", "-n", "3", "--root", "2", "--format", "ascii")
    start_line = next(line for line in text.splitlines() if line.startswith("start"))
    assert start_line.split() == ["start", ".", ".", "#"]


def test_verify_prints_the_smallest_safe_slot_counts():
    lines = invoke("verify", "all_reduce", "-n", "1:5,8", "--slots", "1:8").splitlines()
    rows = {cells(line)[0]: cells(line)[1:] for line in lines if line.startswith("  ")}
    assert rows["algorithm"] == ["n=1", "n=2", "n=3", "n=4", "n=5", "n=8", "order"]
    for name in schedule.algorithms("all_reduce"):
        smallest = [schedule.build("all_reduce", name, n).min_slots(8) for n in (1, 2, 3, 4, 5, 8)]
        assert [int(cell) for cell in rows[name][:-1]] == smallest
        assert rows[name][-1] == schedule.build("all_reduce", name, 8).verify().order
    assert f"{6 * len(schedule.algorithms('all_reduce'))} of " in lines[-1]


def test_verify_every_collective_and_every_root_is_proved():
    text = invoke("verify", "every", "-n", "1:4", "--root", "all")
    titles = re.findall(r"^(\w+): smallest", text, re.MULTILINE)
    having = [row.name for row in _core.collectives() if schedule.algorithms(row.name)]
    assert titles == having and len(having) == 11
    total = 4 * sum(len(schedule.algorithms(name)) for name in having)
    assert text.splitlines()[-1] == f"{total} of {total} proved"


def test_verify_root_that_is_no_rank_is_not_proved():
    assert "0 of 1 proved" in invoke(
        "verify", "gather", "-n", "2", "-a", "star", "--root", "5", status=1
    )
    assert "expected the number of a rank" in invoke("verify", "gather", "--root", "x", status=2)


def test_show_takes_a_collective_and_its_algorithm():
    text = invoke("show", "all_to_all", "pairwise", "-n", "3", "--format", "ascii")
    assert text == schedule.build("all_to_all", "pairwise", 3).draw(format="ascii")
    assert invoke("show", "pairwise", "-n", "3", "--format", "ascii") == text
    assert invoke("show", "pairwise", "-c", "all_to_all", "-n", "3", "--format", "ascii") == text


def test_show_says_which_collectives_share_an_algorithm():
    assert "an algorithm of all_gather, all_to_all" in invoke("show", "bruck", status=2)
    assert "name one of its algorithms, chain, rec" in invoke("show", "scan", status=2)
    assert "broadcast has no algorithm called 'ring'" in invoke(
        "show", "broadcast", "ring", status=2
    )
    assert "expected an algorithm, or" in invoke("show", "scan", "chain", "-c", "exscan", status=2)


def test_simulate_takes_every_collective():
    for collective in (row.name for row in _core.collectives()):
        if not schedule.algorithms(collective):
            assert "has no algorithm" in invoke("simulate", collective, status=2)
            continue
        lines = invoke("simulate", collective, "-n", "4").splitlines()
        names = {cells(line)[0] for line in lines if line.startswith("  ")}
        assert names >= set(schedule.algorithms(collective)), collective


def test_verify_too_few_slots_is_status_1_and_says_why():
    assert schedule.build("all_reduce", "ring", 4).min_slots() == 2
    text = invoke("verify", "-a", "ring", "-n", "4", "--slots", "1", status=1)
    assert "not proved: ring, n=4: " in text
    assert "0 of 1 proved" in text


@pytest.fixture
def registry(monkeypatch):
    """Undoes what a --module registers."""
    monkeypatch.setattr(schedule, "_registered", {})


def test_verify_module_adds_its_algorithms(tmp_path: Path, registry):
    (tmp_path / "mine.py").write_text(MY_ALGORITHM)
    text = invoke("verify", "-a", "my_star", "-n", "1:6", "-m", str(tmp_path / "mine.py"))
    assert "6 of 6 proved" in text


def test_verify_wrong_algorithm_of_a_module_is_not_proved(tmp_path: Path, registry):
    (tmp_path / "wrong.py").write_text(LOSES_RANK_1)
    args = ("verify", "-a", "loses_rank_1", "-n", "3", "-m", str(tmp_path / "wrong.py"))
    assert "not proved: loses_rank_1, n=3: " in invoke(*args, status=1)


def test_module_that_raises_is_status_2(tmp_path: Path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('on import')")
    out = invoke("verify", "-m", str(tmp_path / "broken.py"), status=2)
    assert "broken.py: RuntimeError: on import" in out


def test_simulate_prints_the_fastest_first(tmp_path: Path):
    args = ("--nbytes", "1M", "--alpha", "1us", "--beta", "10GB/s", "--gamma", "20GB/s")
    lines = invoke("simulate", "all_reduce", "-n", "8", *args).splitlines()
    names = [cells(line)[0] for line in lines if line.startswith("  ")]
    names = [name for name in names if name in schedule.algorithms("all_reduce")]
    times = [
        schedule.build("all_reduce", name, 8).simulate(1 << 20, 1e-6, 1e-10, 5e-11).time_s
        for name in names
    ]
    assert sorted(names) == sorted(schedule.algorithms("all_reduce"))
    assert times == sorted(times)


def test_simulate_tells_how_idle_links_are():
    """In a ring without chunks one rank sends at a time; with chunks all do, always."""
    args = ("-a", "ring,ring_naive", "-n", "4", "--alpha", "0s", "--gamma", "0s/byte")
    lines = invoke("simulate", "all_reduce", *args).splitlines()
    idle = {row[0]: row[-2] for row in (cells(line) for line in lines) if "%" in "".join(row)}
    assert idle == {"ring": "0%", "ring_naive": "75%"}


def test_simulate_out_draws_the_timeline(tmp_path: Path):
    pytest.importorskip("matplotlib")
    invoke("simulate", "-a", "ring", "-n", "4", "-o", str(tmp_path / "timeline.png"))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_info_as_json_tells_the_build():
    facts = json.loads(invoke("info", "--json"))
    assert facts["library"] == pycoll._core.__file__
    assert "shm" in facts["core: transports"]
    assert facts["algorithms: all_reduce"] == schedule.algorithms("all_reduce")
    assert "ring" in invoke("info")


# Units.


def test_units_are_read_as_people_write_them():
    sizes = [parse_nbytes(t) for t in ("4", "64K", "1.5MiB", "2 GB")]
    assert sizes == [4, 64 << 10, 3 << 19, 2 << 30]
    assert [parse_seconds(t) for t in ("1us", "0.5 ms", "2s", "1e-6")] == [1e-6, 5e-4, 2.0, 1e-6]
    rates = ("10GB/s", "1GiB/s", "1e-10s/byte", "0")
    assert [parse_seconds_per_byte(t) for t in rates] == [1e-10, 1 / (1 << 30), 1e-10, 0.0]
    assert parse_integers("1:4,8,2", "ranks") == [1, 2, 3, 4, 8]
    assert parse_sizes("4:32") == [4, 8, 16, 32]
    assert parse_sizes("4:1K:16,1M") == [4, 64, 1024, 1 << 20]
    formatted = format_nbytes(1536), format_seconds(12.3e-6), format_rate(3.2e9)
    assert formatted == ("1.5 KiB", "12.3 us", "3.2 GB/s")


def test_units_no_list_of_integers_is_refused():
    for text in ("", "0", "a", "2:1", "1-4", "1,,2"):
        with pytest.raises(UsageError, match="is not a list of ranks"):
            parse_integers(text, "ranks")
