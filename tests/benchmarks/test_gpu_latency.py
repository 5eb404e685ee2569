"""benchmarks/gpu_latency on the emulated device: its rows, its flags, its help."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(420)]


def run(binaries: Path, *flags: object, status: int = 0) -> subprocess.CompletedProcess:
    command = [str(binaries / "gpu_latency"), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, (done.stdout, done.stderr)
    return done


def test_rows_of_all_kinds_are_measured_and_right(binaries, tmp_path):
    """All of `--few`: two seconds."""
    out = run(binaries, "--few", "--json", tmp_path / "rows.jsonl").stdout
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(out.splitlines()) - 1
    kinds = {row["name"].partition(",")[0] for row in rows}
    assert kinds == {"launch", "flag", "memory", "program", "replay"}
    assert all(row["right"] and row["us"] > 0 for row in rows)
    names = [row["name"] for row in rows]
    for way in ("one_shot/ll", "one_shot/poison", "one_shot/simple", "two_shot/ll",
                "two_shot/ll128", "two_shot/simple", "two_shot/direct"):  # fmt: skip
        assert f"replay, {way} n=2 4096 B" in names, way
    for n in (1, 2, 4, 8):
        assert any(name.startswith(f"memory, {n} reads and {n} writes, bf16") for name in names)
    name = "memory, 2 reads and 2 writes, f32, 1 blocks"
    moved = next(row for row in rows if row["name"] == name)
    assert moved["gb_per_s"] == pytest.approx(4 * moved["nbytes"] / moved["us"] / 1e3, abs=0.02)


def test_rows_can_be_chosen_and_time_can_end(binaries):
    out = run(binaries, "--few", "--only", "flag").stdout.splitlines()
    assert [line.split(",")[0] for line in out[1:]] == ["flag", "flag"]
    out = run(binaries, "--few", "--only", "flag", "--seconds", 0).stdout.splitlines()
    assert out[1:] == ["2 rows were not measured in 0 s"]


def test_help_has_examples_and_wrong_flags_are_named(binaries):
    out = run(binaries, "--help").stdout
    assert "examples:\n  gpu_latency --json rows.jsonl" in out
    assert "gpu_latency: unknown option --fast" in run(binaries, "--fast", 1, status=2).stderr
    assert "cannot write /no/such/rows" in run(binaries, "--json", "/no/such/rows", status=2).stderr
