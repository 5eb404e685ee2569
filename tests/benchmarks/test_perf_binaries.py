"""The C++ benchmark programs: every collective of the table, checked, with nccl-tests' columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import builds
import pytest

from pycoll import _core

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(420)]

PROGRAMS = [*(row.name for row in _core.collectives()), "sendrecv"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID")


def run(program: Path, *flags: str, status: int = 0, **more: str) -> tuple[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | more
    command = [str(program), *" ".join(flags).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == status, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if line and not line.startswith("#")]


def test_programs_one_for_each_collective_and_one_for_messages(binaries):
    built = {path.name.removesuffix("_perf") for path in binaries.glob("*_perf")}
    assert built == set(PROGRAMS)


@pytest.mark.parametrize("ranks", ["-r 2", "-t 3"], ids=["processes", "threads"])
def test_perf_every_collective_is_right_at_small_sizes(binaries, tmp_path, ranks):
    path = tmp_path / "perf.json"
    flags = f"{ranks} -b 96 -e 24K -f 16 -n 3 -N 4 -w 1 -J {path}"
    for collective in PROGRAMS:
        out, err = run(binaries / f"{collective}_perf", flags)
        assert err == "" and "# Out of bounds values : 0 OK" in out, collective
        found = json.loads(path.read_text())["rows"]
        printed = rows(out)
        assert len(printed) == (1 if collective == "barrier" else 3)
        for cells in printed:
            assert len(cells) == 13, collective
            forms = [row for row in found if str(row["nbytes"]) == cells[0]]
            assert len(forms) == 2 - (cells[9] == "N/A"), collective
            for row in forms:
                assert (row["collective"], row["dtype"]) == (collective, cells[2])
                assert 0 < row["min_s"] <= row["median_s"] <= row["p99_s"], collective
                assert row["num_calls"] == 3 * 4
                assert row["num_wrong"] == (None if collective == "barrier" else 0), collective


def test_perf_size_and_busbw_are_those_of_nccl_tests(binaries, tmp_path):
    path = tmp_path / "perf.json"
    out, _ = run(binaries / "all_reduce_perf", f"-t 4 -b 1K -e 1K -n 3 -N 4 -J {path}")
    ((size, count, *_),) = rows(out)
    assert (size, count) == ("1024", "256")
    for row in json.loads(path.read_text())["rows"]:
        assert row["algbw"] == pytest.approx(1024 / row["median_s"], abs=1)
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * 3 / 4, abs=1)
    out, _ = run(binaries / "all_reduce_perf", "-b 8 -e 32 -i 8 -t 1 -c 0 -N 4")
    assert [cells[0] for cells in rows(out)] == ["8", "16", "24", "32"]
    assert {cells[8] for cells in rows(out)} == {"N/A"}


def test_perf_all_dtypes_and_ops_are_right_or_say_why_not(binaries):
    flags = "-t 2 -b 64 -e 64 -n 1 -N 1 -w 0 -d all -o all"
    out, _ = run(binaries / "all_reduce_perf", flags)
    measured = {(cells[2], cells[3]) for cells in rows(out)}
    assert {("f32", "sum"), ("bf16", "prod"), ("i64", "max"), ("u8", "avg")} <= measured
    printed = {name for name, _ in measured}, {name for _, name in measured}
    left = len(printed[0]) * len(printed[1]) - len(measured)
    said = [line for line in out.splitlines() if line.startswith("# ")]
    assert len(said) >= left, "a cell is missing without a word"


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("-t 2", ("all_reduce", "all_gather", "broadcast", "barrier")),
        ("-r 2", ("all_reduce",)),
        ("-t 2 -R 1", ("all_reduce",)),
    ],
)
def test_perf_on_the_emulated_device_is_right(binaries, flags, names):
    """Seconds each: the threads of two devices share the cores."""
    builds.build(binaries.parent, "device_threads")
    library = {"PYCOLL_DEVICE_LIBRARY": str(binaries.parent / "_device_threads.so")}
    sizes = "-b 64 -e 64K -f 1024 -n 2 -N 2 -w 1 -g 1"
    for name in names:
        out, err = run(binaries / f"{name}_perf", flags, sizes, **library)
        assert err == "" and "0 OK" in out, name


def test_perf_on_devices_refuses_what_it_cannot_do(binaries):
    _, err = run(binaries / "sendrecv_perf", "-g", "1", status=2)
    assert "on the CPU only" in err
    missing = {"PYCOLL_DEVICE_LIBRARY": "/nowhere/library.so"}
    _, err = run(binaries / "all_reduce_perf", "-t", "1", "-g", "1", status=1, **missing)
    assert "cannot open /nowhere/library.so" in err


@pytest.mark.parametrize("name", ["all_reduce", "sendrecv"])
def test_perf_queued_calls_are_right(binaries, name):
    out, _ = run(binaries / f"{name}_perf", "-b 4K -e 4K -z 0 -t 2")
    assert "0 OK" in out


def test_sendrecv_of_eager_and_announced_messages_is_right(binaries, tmp_path):
    path = tmp_path / "perf.json"
    sizes = f"-b 16 -e 1M -f 256 -n 2 -N 4 -w 1 -J {path}"
    for flags in ("-t 1", "-r 2 -R 1", "-t 3 -d bf16 -z 0"):
        out, err = run(binaries / "sendrecv_perf", flags, sizes)
        assert err == "" and "0 OK" in out, flags
        found = json.loads(path.read_text())["rows"]
        assert [row["nbytes"] for row in found] == [16, 4096, 1 << 20]
        for row in found:
            assert not row["in_place"] and row["busbw"] == row["algbw"] and row["num_wrong"] == 0


def test_sendrecv_has_no_algorithm(binaries):
    _, err = run(binaries / "sendrecv_perf", "-a", "ring", status=2)
    assert "-a" in err


def test_perf_wrong_flag_is_named_and_status_2(binaries):
    words = {
        "-q 1": "-q", "-b lots": "lots", "-b 1M -e 1K": "-e", "-n": "-n needs a value",
        "-n 0": "1 to", "-N 0": "1 to", "-d f9": "bf16", "-o plus": "prod", "-f 1": "-f",
        "--iters=x": "--iters", "-b 0 -f 2": "-i",
    }  # fmt: skip
    for flags, word in words.items():
        out, err = run(binaries / "all_reduce_perf", flags, status=2)
        assert word in err and len(err.splitlines()) == 1 and out == "", flags


def test_perf_root_that_is_not_there_is_status_2(binaries):
    _, err = run(binaries / "broadcast_perf", "--root", "2", "-r", "2", status=2)
    assert "--root 2: there are 2 ranks" in err


def test_perf_help_lists_every_flag(binaries):
    out, _ = run(binaries / "all_reduce_perf", "-h")
    flags = (
        "minbytes maxbytes stepbytes stepfactor iters blocks warmup_iters check op datatype json"
    )
    assert all(f"--{flag}" in out for flag in flags.split()) and "Examples" in out


def test_perf_under_a_launcher_takes_its_ranks(binaries, tmp_path):
    program = str(binaries / "all_reduce_perf")
    path = tmp_path / "launch.py"
    path.write_text("import os, sys\nos.execv(sys.argv[1], sys.argv[1:])\n")
    command = [sys.executable, "-m", "pycoll", "run", "-n", "3", "--no-prefix", str(path)]
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    env["PYTHONPATH"] = str(builds.ROOT)
    done = subprocess.run(
        [*command, program, "-b", "64", "-e", "64", "-n", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "3 ranks (launched processes)" in done.stdout
    assert len(rows(done.stdout)) == 1  # rank 0 alone prints


def test_perf_rank_that_does_not_come_is_named(binaries):
    _, err = run(
        binaries / "all_reduce_perf", "-b", "64", "-e", "64", "-T", "1", status=1,
        RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29871",
    )  # fmt: skip
    assert "rank 1" in err


def test_call_overhead_is_below_a_microsecond(binaries):
    """Built without much optimisation, on a machine that does other things: still far below."""
    out, _ = run(binaries / "call_overhead", "2000")
    figures = json.loads(out)
    assert 0 < figures["one_rank_ns"] < 1000 and 0 < figures["loopback_ns"] < 1000
