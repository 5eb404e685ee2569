"""benchmarks/gpu_first.sh: its three commands on the emulated device, from a new clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_first.sh"
ONE_TEST = "tests/device/test_device_memory.py::test_info_shows_the_devices"


def run(clone: Path, part: object, out: Path, **more: object) -> str:
    here = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OUT": str(out),
        "DEVICE": "threads",
        "PYTHON": sys.executable,
        "PATH": f"{here}:{os.environ['PATH']}",
        "TESTS": ONE_TEST,
        # What asks a network fails.
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "PIP_NO_INDEX": "1",
    }
    done = subprocess.run(
        ["bash", "benchmarks/gpu_first.sh", str(part)],
        cwd=clone,
        env=env | {name: str(value) for name, value in more.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2000,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def statuses(out: Path) -> dict[str, list[str]]:
    """The statuses of the programs, by log."""
    return {
        path.name: re.findall(r"^status (\d+)$", path.read_text(), re.MULTILINE)
        for path in out.glob("*.log")
    }


@pytest.mark.pure
def test_programs_of_a_command_share_its_time(tmp_path):
    """A program that hangs is killed, and no other one is begun: two seconds of waiting."""
    most = int(re.search(r"SECONDS_MOST:-(\d+)", SCRIPT.read_text()).group(1))
    assert most + 25 < 480  # gpu_check, if it hangs, is killed after 20 s, or 25 s
    program = tmp_path / "benchmarks" / SCRIPT.name
    (tmp_path / ".built").mkdir()
    program.parent.mkdir()
    shutil.copy(SCRIPT, program)
    perf = tmp_path / "build/gpu/benchmarks/all_reduce_perf"
    perf.parent.mkdir(parents=True)
    for path, text in ((perf, "sleep 100"), (tmp_path / "python", "exit 0")):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    start = time.monotonic()
    run(tmp_path, 3, tmp_path / "out", SECONDS_MOST=2, PYTHON=tmp_path / "python")
    assert time.monotonic() - start < 30
    log = (tmp_path / "out" / "perf.log").read_text()
    assert log.count("status 124") <= 1 and "skipped: no time was left" in log


@pytest.mark.pure
def test_without_a_number_it_says_how_it_is_called(tmp_path):
    done = subprocess.run(["bash", SCRIPT], env=os.environ | {"OUT": str(tmp_path)},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2 and "gpu_first.sh 1   looks around" in done.stderr


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(3000)
def test_all_three_commands_run_from_a_new_clone_without_a_network(tmp_path):
    """It compiles the core, the emulated device and the programs: five minutes of two cores."""
    clone, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    # The machine is busy with other tests: more time than on the machine with a GPU.
    run(clone, 1, out, SECONDS_MOST=1900, BUILD_SECONDS=1500)
    found = statuses(out)
    for log in ("matrix.log", "latencies.log", "threads.log", "processes.log"):
        assert found[log] and set(found[log]) == {"0"}, (log, (out / log).read_text()[-3000:])
    assert (out / "latencies.jsonl").read_text().count("replay, ") >= 8
    # As on a machine that has nothing but the tree and what was built.
    (out / "built").rename(clone / ".built")
    (clone / "build").rename(tmp_path / "gone")
    said = run(clone, 2, out, SECONDS_MOST=900)
    results = json.loads((out / "tests.json").read_text())
    assert results["passed"] and ", 0 failures" in results["matrix"], said[-4000:]
    assert "1 passed" in results["tests"]["pytest"]
    assert (out / "tests.xml").is_file()
    run(clone, 3, out, SECONDS_MOST=900)
    (record,) = out.glob("emulated-*.json")
    series = json.loads(record.read_text())["series"]
    assert series["pycoll, reduce_scatter bf16 2 threads registered avg"]["rows"]
    assert "skipped" in (out / "mps.log").read_text()
    assert set(statuses(out)["perf.log"]) == {"0"}
