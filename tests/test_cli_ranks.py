"""`pycoll run` and `pycoll bench`: commands that start ranks, and leave none."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from command_line import invoke, run, start
from processes import wait_for_pids, wait_until_gone

from pycoll import _core

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
    out, err = run("run", "-n", "1", path, OMP_NUM_THREADS="3")
    assert (out, err) == ("[0] 3\n", "")
    out, err = run("run", "-n", "1", path)
    assert (out, err) == ("[0] None\n", "")


def test_run_module_without_prefix_passes_its_output_on_as_it_is():
    out, _ = run("run", "-n", "1", "--no-prefix", "-m", "calendar", "2024", "2")
    assert out.startswith("   February 2024\n")


def test_run_prefix_marks_every_line_of_both_streams(script):
    path = script("import sys\nprint('out')\nprint('a\\nb', file=sys.stderr)\nprint('end', end='')")
    out, err = run("run", "-n", "2", path, OMP_NUM_THREADS="1")
    assert sorted(out.splitlines()) == ["[0] end", "[0] out", "[1] end", "[1] out"]
    assert sorted(err.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]


@pytest.mark.parametrize("command", [["run"], ["check", "--mesh", "dp=2"], ["flops"], ["chaos"]])
def test_command_of_a_script_says_what_is_not_one(command):
    assert "lost.py: no such file" in invoke(*command, "lost.py", status=2)
    for python in ("python", "/usr/bin/python3.11"):
        said = invoke(*command, python, "train.py", status=2)
        assert "each rank starts Python by itself" in said and "train.py" in said


def test_run_status_is_that_of_the_first_rank_that_fails(script):
    path = script(
        "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(7)\ntime.sleep(1000)\n"
    )
    _, err = run("run", "-n", "3", "--grace", "0.3", path, status=7)
    assert "rank 2 of 3 exited with status 7" in err


def test_run_status_is_not_that_of_a_rank_that_fails_later(script, tmp_path: Path):
    path = script(
        "import os, pathlib, sys, time\n"
        "first = pathlib.Path(sys.argv[1])\n"
        "if os.environ['RANK'] == '1':\n"
        "    first.write_text(str(os.getpid()))\n"
        "    sys.exit(7)\n"
        "while not (first.exists() and first.read_text()): time.sleep(0.01)\n"
        "stat = pathlib.Path('/proc', first.read_text(), 'stat')\n"
        "while stat.exists() and ' Z ' not in stat.read_text(): time.sleep(0.01)\n"
        "sys.exit(5)\n"
    )
    run("run", "-n", "2", "--grace", "20", path, str(tmp_path / "first"), status=7)


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


# pycoll bench.
FEW = ("--iterations", "3", "--warmup", "1")


ELASTIC = """
import os, pathlib, sys, time
rank, again, done = os.environ["RANK"], os.environ.get("PYCOLL_JOIN"), pathlib.Path(sys.argv[1])
print(os.environ["PYCOLL_ELASTIC"].partition(":")[0], again)
if rank == "1" and not again:
    sys.exit(3)
if rank == "1":
    done.touch()
while not done.exists():
    time.sleep(0.01)
"""


def test_run_elastic_starts_a_rank_that_ended_again(script, tmp_path: Path):
    out, err = run("run", "--elastic", "1:3", script(ELASTIC), str(tmp_path / "done"))
    assert sorted(out.splitlines()) == [
        "[0] 127.0.0.1 None",
        "[1] 127.0.0.1 1",
        "[1] 127.0.0.1 None",
        "[2] 127.0.0.1 None",
    ]
    said = "rank 1 of 3 exited with status 3; starting it again in 0.5 s (1 of 10)"
    assert said in err


@pytest.mark.slow
def test_run_elastic_ends_when_the_training_ends_or_too_few_ranks_are_left(script, tmp_path: Path):
    path, done = script(ELASTIC), str(tmp_path / "done")
    _, err = run("run", "--elastic", "2:2", "--grace", "0.1", path, done, status=3)
    assert "rank 1 of 2 exited with status 3" in err and "again" not in err
    late = script("import os, time; time.sleep(60 * int(os.environ['RANK']))")
    run("run", "--elastic", "1:2", "--grace", "0.1", late)  # rank 1 came too late to train
    once = script("import os, sys, time; time.sleep(1 - int(os.environ['RANK'])); sys.exit(2)")
    _, err = run("run", "--elastic", "1:2", "--restarts", "0", once, status=2)
    assert "rank 1 of 2 exited with status 2; all 0 restarts are used up" in err
    for wrong in ("2", "3:2", "0:1", "a:b"):
        _, err = run("run", "--elastic", wrong, path, status=2)
        assert "expected MIN:MAX, such as 2:4" in err


def test_bench_rows_are_right_and_in_the_order_asked():
    args = ("-n", "2", "-a", "ring,one_shot", "--sizes", "4,100K", *FEW, "--json", "-")
    rows = json.loads(invoke("bench", *args))["rows"]
    expected = [(name, nbytes) for nbytes in (4, 100 << 10) for name in ("ring", "one_shot")]
    assert [(row["chosen"], row["nbytes"]) for row in rows] == expected
    assert all(row["num_wrong"] == 0 for row in rows)
    assert all(0 < row["min_s"] <= row["median_s"] <= row["p99_s"] for row in rows)


def test_bench_every_collective_is_right():
    for collective in (row.name for row in _core.collectives()):
        text = invoke("bench", collective, "-n", "3", "--threads", "--sizes", "1K", *FEW)
        (row,) = (line for line in text.splitlines() if "pycoll, auto" in line)
        assert row.split()[-1] == "0" and "/" in row, text  # no wrong element; a named choice


def test_bench_of_mapped_arrays_measures_the_protocol_direct():
    args = ("-n", "2", "--mapped", "-a", "auto,two_shot/direct", "--sizes", "1M", *FEW)
    rows = json.loads(invoke("bench", *args, "--json", "-"))["rows"]
    assert [row["num_wrong"] for row in rows] == [0, 0]
    assert rows[0]["chosen"].endswith("/direct")
    assert rows[1]["chosen"] == "two_shot/direct"


def test_bench_wrong_elements_are_status_1(monkeypatch):
    from pycoll.communicator import Communicator

    all_reduce = Communicator.all_reduce

    def off_by_one(self, x, op="sum", out=None, **options):
        all_reduce(self, x, op, out, **options)
        if out is not None:
            out[0, 0] += 1

    monkeypatch.setattr(Communicator, "all_reduce", off_by_one)
    args = ("bench", "-n", "2", "--sizes", "64", *FEW, "--json", "-")
    assert json.loads(invoke(*args, status=1))["rows"][0]["num_wrong"] == 4  # twice on each rank


def test_bench_goes_on_from_its_record(tmp_path: Path):
    path = tmp_path / "speed.json"
    invoke("bench", "--threads", "--sizes", "4,64", *FEW, "--json", str(path))
    data = json.loads(path.read_text())
    data["rows"].pop()
    data["rows"][0]["median_s"] = 12.5
    path.write_text(json.dumps(data))
    text = invoke("bench", "--threads", "--sizes", "4,64,256", *FEW, "--json", str(path))
    assert "12.5 s" in text and "256 B" in text  # the first row is the record's
    assert len(json.loads(path.read_text())["rows"]) == 3
    other = invoke("bench", "-n", "3", "--threads", *FEW, "--json", str(path), status=2)
    assert "another measurement" in other


@pytest.mark.slow
def test_bench_plots_what_it_measured(tmp_path: Path):
    pytest.importorskip("matplotlib")
    args = ("bench", "--threads", "--sizes", "1K,4K", *FEW, "--dtype", "i32", "--plot")
    for ending, head in {"svg": "<?xml", "png": "\x89PNG", "html": "<!doctype"}.items():
        path = tmp_path / f"plot.{ending}"
        invoke(*args, str(path))
        assert path.read_bytes().startswith(head.encode("latin-1"))
    page = (tmp_path / "plot.html").read_text()
    assert page.count("<tr>") == 3 and "<svg" in page and "all_reduce (sum), i32" in page
    assert "http-equiv" not in page and "src=" not in page  # nothing to load


@pytest.mark.torch
def test_bench_peers_are_measured_beside_pycoll():
    pytest.importorskip("torch")
    args = ("bench", "-n", "2", "--sizes", "64,4K", *FEW, "--peers", "--json", "-")
    rows = json.loads(invoke(*args))["rows"]
    assert [row["library"] for row in rows] == ["pycoll", "gloo"] * 2


def test_bench_asked_wrongly_is_status_2():
    assert "no collective is called" in invoke("bench", "all_reduces", status=2)
    assert "--op" in invoke("bench", "--op", "plus", status=2)
    assert "range of sizes" in invoke("bench", "--sizes", "0", status=2)
    assert "gif" in invoke("bench", "--plot", "x.gif", status=2)
    assert "--threads" in invoke("bench", "--threads", "--peers", status=2)
