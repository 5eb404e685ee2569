"""`pycoll run` and `pycoll bench`: commands that start ranks, and leave none."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from command_line import invoke, run, start
from processes import wait_for_pids, wait_until_gone

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


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


def test_run_sets_the_environment_of_a_rank(script):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYCOLL_TOKEN")
    path = script(f"import os, json\nprint(json.dumps([os.environ[n] for n in {names!r}]))")
    out, _ = run("run", "-n", "3", path)
    values = [json.loads(line[len("[0] ") :]) for line in sorted(out.splitlines())]
    assert [v[:4] for v in values] == [[str(r), "3", str(r), "127.0.0.1"] for r in range(3)]
    assert len({tuple(v[4:]) for v in values}) == 1
    assert len(values[0][5]) >= 32


def test_run_one_thread_per_rank_unless_told_otherwise(script):
    path = script("import os; print(os.environ.get('OMP_NUM_THREADS'))")
    out, err = run("run", "-n", "2", path)
    assert sorted(out.splitlines()) == ["[0] 1", "[1] 1"]
    assert "OMP_NUM_THREADS=1" in err
    out, err = run("run", "-n", "2", path, OMP_NUM_THREADS="3")
    assert (sorted(out.splitlines()), err) == (["[0] 3", "[1] 3"], "")
    out, err = run("run", "-n", "1", path)
    assert (out, err) == ("[0] None\n", "")


def test_run_no_prefix_passes_output_on_as_it_is(script):
    out, _ = run("run", "-n", "1", "--no-prefix", script("print('a\\nb', end='')"))
    assert out == "a\nb"


def test_run_module_runs_it_by_name():
    out, _ = run("run", "-n", "2", "-m", "calendar", "2024", "2")
    assert out.count("February 2024") == 2


def test_run_prefix_marks_every_line_of_both_streams(script):
    path = script("import sys\nprint('out')\nprint('a\\nb', file=sys.stderr)\nprint('end', end='')")
    out, err = run("run", "-n", "2", path, OMP_NUM_THREADS="1")
    assert sorted(out.splitlines()) == ["[0] end", "[0] out", "[1] end", "[1] out"]
    assert sorted(err.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]


def test_run_status_is_that_of_the_first_rank_that_fails(script):
    path = script(
        "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(7)\ntime.sleep(1000)\n"
    )
    begin = time.monotonic()
    _, err = run("run", "-n", "3", "--grace", "0.3", path, status=7)
    assert "rank 2 of 3 exited with status 7" in err
    assert time.monotonic() - begin < 30


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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_run_ended_by_a_signal_leaves_no_process(script, tmp_path: Path, signum):
    path = script(STUBBORN)
    command = start("run", "-n", "3", "--grace", "0.3", path, str(tmp_path), "with_child")
    pids = wait_for_pids(tmp_path, 6)
    command.send_signal(signum)
    command.communicate(timeout=30)
    assert command.returncode == 128 + signum
    wait_until_gone(pids)


def test_run_killed_leaves_no_rank(script, tmp_path: Path):
    command = start("run", "-n", "3", script(STUBBORN), str(tmp_path))
    pids = wait_for_pids(tmp_path, 3)
    command.kill()
    command.communicate(timeout=30)
    wait_until_gone(pids)


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


def test_bench_wrong_elements_are_status_1(monkeypatch):
    from pycoll.communicator import Communicator

    all_reduce = Communicator.all_reduce

    def off_by_one(self, x, op="sum", out=None, **options):
        all_reduce(self, x, op, out, **options)
        out[0] += 1

    monkeypatch.setattr(Communicator, "all_reduce", off_by_one)
    args = ("bench", "-n", "2", "--sizes", "64", "--iterations", "3", "--json")
    assert json.loads(invoke(*args, status=1))["rows"][0]["num_wrong"] == 4  # twice on each rank


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_bench_threads_prints_a_row_and_plots(collective, tmp_path: Path):
    pytest.importorskip("matplotlib")
    args = ("--threads", "--sizes", "1K", "--iterations", "3", "--dtype", "i32")
    text = invoke("bench", collective, *args, "-o", str(tmp_path / "plot.svg"))
    (row,) = (line for line in text.splitlines() if "1 KiB" in line)
    assert "/" in row.split()[0]  # the algorithm and the protocol that were chosen
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<?xml")
