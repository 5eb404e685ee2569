"""`make gpu-check`: what it says without a GPU, and all of its parts on the emulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import builds
import gpu_check
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu_check.py"


def run(*flags: str, status: int = 0, **more: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *flags],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == status, (done.stdout[-4000:], done.stderr[-4000:])
    return done.stdout, done.stderr


@pytest.mark.pure
def test_without_a_gpu_one_sentence_says_what_is_missing(tmp_path):
    out, err = run(status=2, PATH=str(tmp_path))  # no nvidia-smi, nvcc, cmake, ninja
    assert out == "" and err.count("\n") == 1
    assert err.startswith("gpu-check: this machine lacks a GPU (nvidia-smi finds none)")
    assert "cmake" in err and "ninja" in err


@pytest.mark.pure
def test_each_part_asks_for_its_own_needs(monkeypatch):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda _: None)
    assert {"cmake", "ninja"} <= set(gpu_check.missing(["build"], "threads"))
    assert gpu_check.missing(["bench"], "threads") == []
    assert "nvcc" not in gpu_check.missing(["bench"], "cuda")


@pytest.fixture(scope="module")
def library() -> str:
    """The emulated device, in the folder that the core was built in."""
    if given := os.environ.get("PYCOLL_TEST_DEVICE_LIBRARY"):
        return given
    folder = builds.plain()
    builds.build(folder, "device_threads")
    return str(folder / "_device_threads.so")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_all_but_the_build_runs_on_the_emulated_device(library, tmp_path):
    pytest.importorskip("ml_dtypes")
    flags = ["--device", "threads", "--build-folder", str(tmp_path / "build")]
    one = f"{ROOT}/tests/device/test_device_memory.py::test_info_shows_the_devices"
    out, _ = run("--part", "test", "--tests", one, *flags, PYCOLL_DEVICE_LIBRARY=library)
    assert "1 passed" in out and "memcheck: skipped: gpu_matrix was not built" in out
    out, _ = run("--part", "bench", "--out", str(tmp_path), *flags, PYCOLL_DEVICE_LIBRARY=library)
    (path,) = tmp_path.glob("emulated-*.json")
    record = json.loads(path.read_text())
    assert record["complete"] and record["emulated"] and record["copy_ceiling_bytes_per_s"] > 0
    assert record["tests"]["passed"] and set(record["tests"]["sanitizers"]) == {
        "memcheck", "racecheck",
    }  # fmt: skip
    assert record["machine"]["commit"] == record["tests"]["commit"]
    series = record["series"]
    rows = series["pycoll, all_reduce f32 2 threads"]["rows"]
    assert [row["nbytes"] for row in rows] == [8, 4096, 100_000]
    assert all(row["end_to_end_us"] > 0 and row["launch_us"] > 0 for row in rows)
    assert "note" in series["torch's nccl, all_reduce f32 2 processes"]
    assert path.with_suffix(".png").is_file() or "matplotlib" in record["picture"]
