"""The command line: what it prints, what it writes, and with which status it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pycoll
from pycoll import UsageError, schedule
from pycoll.cli import app
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

ROOT = Path(pycoll.__file__).parents[1]
COMMANDS = ("show", "verify", "simulate", "run", "bench", "info")
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


def invoke(*args: str, status: int = 0) -> str:
    """Runs a command in this process; returns what it prints."""
    result = CliRunner().invoke(app, args)
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, **more}


def start(*args: str, **more: str) -> subprocess.Popen[str]:
    """Starts a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "pycoll.cli", *args],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*args: str, status: int = 0, **more: str) -> tuple[str, str]:
    process = start(*args, **more)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, (out, err)
    return out, err


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


# Help and errors.


@pytest.mark.pure
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(command):
    text = invoke(command, "--help")
    assert "Examples" in text
    assert f"pycoll {command}" in text


@pytest.mark.pure
def test_help_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys; from typer.testing import CliRunner; from pycoll.cli import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "sys.exit(not {'torch', 'matplotlib'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=60)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "no_such"), "no_such"),
        (("show", "ring", "-o", "ring.gif"), "gif"),
        (("verify", "no_such"), "no collective"),
        (("verify", "-n", "3:1"), "'3:1' is no list of rank counts"),
        (("simulate", "--nbytes", "many"), "'many' is no size"),
        (("simulate", "--beta", "fast"), "'fast' is no rate"),
        (("verify", "--module", "no_such.py"), "no_such.py"),
        (("bench", "--dtype", "f8"), "--dtype"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(args, message):
    _, err = run(*args, status=2)
    assert message in err
    assert err.startswith("pycoll: ")
    assert err.count("\n") == 1


# Pictures, proofs, simulations.


@pytest.mark.pure
def test_show_without_file_prints_the_text_picture():
    expected = schedule.build("all_reduce", "ring", 4).draw()
    assert invoke("show", "ring", "-n", "4") == expected


@pytest.mark.pure
@pytest.mark.parametrize(("name", "start"), [("ring.svg", b"<?xml"), ("ring.png", b"\x89PNG")])
def test_show_with_file_writes_it(tmp_path: Path, name, start):
    pytest.importorskip("matplotlib")
    invoke("show", "ring", "-n", "4", "-o", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.pure
def test_show_programs_prints_the_explanation():
    built = schedule.build("all_reduce", "ring", 4)
    assert invoke("show", "ring", "-n", "4", "--programs").strip() == built.explain().strip()


@pytest.mark.pure
def test_show_root_of_a_broadcast_is_drawn():
    text = invoke("show", "star", "-c", "broadcast", "-n", "3", "--root", "2", "--format", "ascii")
    start_line = next(line for line in text.splitlines() if line.startswith("start"))
    assert start_line.split() == ["start", ".", ".", "#"]


@pytest.mark.pure
def test_verify_prints_the_smallest_safe_slot_counts():
    lines = invoke("verify", "all_reduce", "-n", "1:5,8", "--slots", "1:8").splitlines()
    rows = {cells(line)[0]: cells(line)[1:] for line in lines if line.startswith("  ")}
    assert rows["algorithm"] == ["n=1", "n=2", "n=3", "n=4", "n=5", "n=8"]
    for name in schedule.algorithms("all_reduce"):
        smallest = [schedule.build("all_reduce", name, n).min_slots(8) for n in (1, 2, 3, 4, 5, 8)]
        assert [int(cell) for cell in rows[name]] == smallest
    assert f"{6 * len(schedule.algorithms('all_reduce'))} of " in lines[-1]


@pytest.mark.pure
def test_verify_too_few_slots_is_status_1_and_says_why():
    assert schedule.build("all_reduce", "ring", 4).min_slots() == 2
    text = invoke("verify", "-a", "ring", "-n", "4", "--slots", "1", status=1)
    assert "not proved: ring, n=4: " in text
    assert "0 of 1 proved" in text


@pytest.fixture
def registry(monkeypatch):
    """Undoes what a --module registers."""
    monkeypatch.setattr(schedule, "_registered", {})


@pytest.mark.pure
def test_verify_module_adds_its_algorithms(tmp_path: Path, registry):
    (tmp_path / "mine.py").write_text(MY_ALGORITHM)
    text = invoke("verify", "-a", "my_star", "-n", "1:6", "-m", str(tmp_path / "mine.py"))
    assert "6 of 6 proved" in text


@pytest.mark.pure
def test_verify_wrong_algorithm_of_a_module_is_not_proved(tmp_path: Path, registry):
    (tmp_path / "wrong.py").write_text(LOSES_RANK_1)
    args = ("verify", "-a", "loses_rank_1", "-n", "3", "-m", str(tmp_path / "wrong.py"))
    assert "not proved: loses_rank_1, n=3: " in invoke(*args, status=1)


@pytest.mark.pure
def test_module_that_raises_is_status_2(tmp_path: Path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('on import')")
    out = invoke("verify", "-m", str(tmp_path / "broken.py"), status=2)
    assert "broken.py: RuntimeError: on import" in out


@pytest.mark.pure
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


@pytest.mark.pure
def test_simulate_out_draws_the_timeline(tmp_path: Path):
    pytest.importorskip("matplotlib")
    invoke("simulate", "-a", "ring", "-n", "4", "-o", str(tmp_path / "timeline.png"))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.pure
def test_info_as_json_tells_the_build():
    facts = json.loads(invoke("info", "--json"))
    assert facts["library"] == pycoll._core.__file__
    assert "shm" in facts["core: transports"]
    assert facts["algorithms: all_reduce"] == schedule.algorithms("all_reduce")
    assert "ring" in invoke("info")


# Units.


@pytest.mark.pure
def test_units_are_read_as_people_write_them():
    assert [parse_nbytes(t) for t in ("4", "64K", "1.5MiB", "2 GB")] == [
        4,
        64 << 10,
        3 << 19,
        2 << 30,
    ]
    assert [parse_seconds(t) for t in ("1us", "0.5 ms", "2s", "1e-6")] == [1e-6, 5e-4, 2.0, 1e-6]
    rates = ("10GB/s", "1GiB/s", "1e-10s/byte", "0")
    assert [parse_seconds_per_byte(t) for t in rates] == [1e-10, 1 / (1 << 30), 1e-10, 0.0]
    assert parse_integers("1:4,8,2", "ranks") == [1, 2, 3, 4, 8]
    assert parse_sizes("4:32") == [4, 8, 16, 32]
    assert parse_sizes("4:1K:16,1M") == [4, 64, 1024, 1 << 20]
    assert (format_nbytes(1536), format_seconds(12.3e-6), format_rate(3.2e9)) == (
        "1.5 KiB",
        "12.3 us",
        "3.2 GB/s",
    )


@pytest.mark.pure
@pytest.mark.parametrize("text", ["", "0", "a", "2:1", "1-4", "1,,2"])
def test_units_no_list_of_integers_is_refused(text):
    with pytest.raises(UsageError, match="is no list of ranks"):
        parse_integers(text, "ranks")


# Ranks.


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.ranks
def test_run_ranks_of_a_script_reduce_together(script):
    path = script(
        "import sys, numpy as np, pycoll\n"
        "with pycoll.init() as comm:\n"
        "    x = np.full(3, comm.rank + 1.0)\n"
        "    comm.all_reduce(x)\n"
        "    print(x.tolist(), sys.argv[1:])\n"
    )
    out, _ = run("run", "-n", "4", path, "--epochs", "3", "-n", "9")
    expected = "[10.0, 10.0, 10.0] ['--epochs', '3', '-n', '9']"
    assert sorted(out.splitlines()) == [f"[{rank}] {expected}" for rank in range(4)]


@pytest.mark.ranks
def test_run_sets_the_environment_of_a_rank(script):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYCOLL_TOKEN")
    path = script(f"import os, json\nprint(json.dumps([os.environ[n] for n in {names!r}]))")
    out, _ = run("run", "-n", "3", path)
    values = [json.loads(line[len("[0] ") :]) for line in sorted(out.splitlines())]
    assert [v[:4] for v in values] == [[str(r), "3", str(r), "127.0.0.1"] for r in range(3)]
    assert len({tuple(v[4:]) for v in values}) == 1
    assert len(values[0][5]) >= 32


@pytest.mark.ranks
def test_run_one_thread_per_rank_unless_told_otherwise(script):
    path = script("import os; print(os.environ.get('OMP_NUM_THREADS'))")
    out, err = run("run", "-n", "2", path)
    assert sorted(out.splitlines()) == ["[0] 1", "[1] 1"]
    assert "OMP_NUM_THREADS=1" in err
    out, err = run("run", "-n", "2", path, OMP_NUM_THREADS="3")
    assert (sorted(out.splitlines()), err) == (["[0] 3", "[1] 3"], "")
    out, err = run("run", "-n", "1", path)
    assert (out, err) == ("[0] None\n", "")


@pytest.mark.ranks
def test_run_no_prefix_passes_output_on_as_it_is(script):
    out, _ = run("run", "-n", "1", "--no-prefix", script("print('a\\nb', end='')"))
    assert out == "a\nb"


@pytest.mark.ranks
def test_run_module_runs_it_by_name():
    out, _ = run("run", "-n", "2", "-m", "calendar", "2024", "2")
    assert out.count("February 2024") == 2


@pytest.mark.ranks
def test_run_prefix_marks_every_line_of_both_streams(script):
    path = script("import sys\nprint('out')\nprint('a\\nb', file=sys.stderr)\nprint('end', end='')")
    out, err = run("run", "-n", "2", path, OMP_NUM_THREADS="1")
    assert sorted(out.splitlines()) == ["[0] end", "[0] out", "[1] end", "[1] out"]
    assert sorted(err.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]


@pytest.mark.ranks
def test_run_status_is_that_of_the_first_rank_that_fails(script):
    path = script(
        "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(7)\ntime.sleep(1000)\n"
    )
    begin = time.monotonic()
    _, err = run("run", "-n", "3", "--grace", "0.3", path, status=7)
    assert "rank 2 of 3 exited with status 7" in err
    assert time.monotonic() - begin < 30


@pytest.mark.ranks
def test_run_rank_killed_by_a_signal_is_named(script):
    path = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    _, err = run("run", "-n", "1", path, status=128 + signal.SIGKILL)
    assert "rank 0 of 1 was killed by SIGKILL" in err


STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only SIGKILL ends this one
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
if "with_child" in sys.argv:
    (folder / f"rank{rank}.child").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
(folder / f"rank{rank}").write_text(str(os.getpid()))
time.sleep(1000)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_run_ended_by_a_signal_leaves_no_process(script, tmp_path: Path, signum):
    path = script(STUBBORN)
    command = start("run", "-n", "3", "--grace", "0.3", path, str(tmp_path), "with_child")
    pids = wait_for_pids(tmp_path, 6)
    command.send_signal(signum)
    command.communicate(timeout=30)
    assert command.returncode == 128 + signum
    wait_until_gone(pids)


@pytest.mark.ranks
def test_run_killed_leaves_no_rank(script, tmp_path: Path):
    command = start("run", "-n", "3", script(STUBBORN), str(tmp_path))
    pids = wait_for_pids(tmp_path, 3)
    command.kill()
    command.communicate(timeout=30)
    wait_until_gone(pids)


@pytest.mark.ranks
def test_bench_counts_no_wrong_element():
    text = invoke(
        "bench",
        "-n",
        "2",
        "-a",
        "ring,one_shot",
        "--sizes",
        "4,100K",
        "--iterations",
        "3",
        "--json",
    )
    rows = json.loads(text)["rows"]
    assert [(row["algorithm"], row["nbytes"]) for row in rows] == [
        ("ring", 4),
        ("one_shot", 4),
        ("ring", 100 << 10),
        ("one_shot", 100 << 10),
    ]
    assert all(row["num_wrong"] == 0 for row in rows)
    assert all(0 < row["min_s"] <= row["median_s"] for row in rows)


@pytest.mark.ranks
def test_bench_wrong_elements_are_status_1(monkeypatch):
    from pycoll.communicator import Communicator

    all_reduce = Communicator.all_reduce

    def off_by_one(self, x, op="sum", out=None, **options):
        all_reduce(self, x, op, out, **options)
        out[0] += 1

    monkeypatch.setattr(Communicator, "all_reduce", off_by_one)
    args = ("bench", "-n", "2", "--sizes", "64", "--iterations", "3", "--json")
    assert json.loads(invoke(*args, status=1))["rows"][0]["num_wrong"] == 4  # twice on each rank


@pytest.mark.ranks
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_bench_threads_prints_a_row_and_plots(collective, tmp_path: Path):
    pytest.importorskip("matplotlib")
    args = ("--threads", "--sizes", "1K", "--iterations", "3", "--dtype", "i32")
    text = invoke("bench", collective, *args, "-o", str(tmp_path / "plot.svg"))
    (row,) = (line for line in text.splitlines() if "1 KiB" in line)
    assert "/" in cells(row)[0]  # the algorithm and the protocol that were chosen
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<?xml")


def wait_for_pids(folder: Path, count: int) -> list[int]:
    """Waits until so many ranks have written their process ids."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob("rank*")]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError(f"the ranks did not start: {list(folder.iterdir())}")


def wait_until_gone(pids: list[int]) -> None:
    """Fails when a process still runs after 5 s; a zombie that nobody has reaped yet is gone."""
    deadline = time.monotonic() + 5
    while running := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
