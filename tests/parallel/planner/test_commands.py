"""`pycoll plan` and `pycoll flops` on an example script, and files of clusters with devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pycoll import UsageError, topology
from pycoll import parallel as pc
from pycoll.parallel.planner import calibrate
from pycoll.topology import Device

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = ROOT / "examples" / "topologies" / "a100_hosts.toml"


def pycoll(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pycoll", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
def test_commands_stop_a_script_at_its_first_step(tmp_path):
    """Ten seconds: three starts of Python with torch."""
    counted = pycoll("flops", "examples/gpt.py", "--depth", "1")
    assert counted.returncode == 0 and "head  " in counted.stdout, counted.stderr
    picture = tmp_path / "plan.svg"
    arguments = ("--world", "4", "--cluster", str(CLUSTER), "--memory", "16GB")
    planned = pycoll("plan", "examples/gpt.py", *arguments, "--plot", str(picture))
    assert planned.returncode == 0 and "a rank:\nlayout " in planned.stdout, planned.stderr
    assert "<svg" in picture.read_text()
    empty = tmp_path / "empty.py"
    empty.write_text("")
    refused = pycoll("flops", str(empty))
    assert refused.returncode == 2 and "took no step" in refused.stderr


def test_a_written_cluster_has_its_device(tmp_path):
    device = Device(
        name='a "chip"',
        flops_per_s=2e12,
        memory_bytes_per_s=3e10,
        attained=0.75,
        operator_s=5e-6,
        capacity_bytes=8 * 10**9,
    )
    level = topology.Level(name="host", size=4, link_bytes_per_s=1e9, latency_s=1e-6)
    cluster = topology.Topology(levels=(level,), name="four", device=device, gamma_s_per_byte=1e-9)
    (tmp_path / "four.toml").write_text(topology.dumps(cluster))
    found = topology.load(tmp_path / "four.toml")
    assert found.levels == cluster.levels and found.name == "four" and found.device == device
    assert found.gamma_s_per_byte == pytest.approx(1e-9)


def test_calibrated_rates_are_what_a_block_attains(monkeypatch):
    """The estimate of the block's step is then the measured one, if operators start at once."""
    step_s = 0.2
    monkeypatch.setattr(calibrate, "run_ranks", lambda *_: [(1e11, 1e10, 0.0, step_s, None)] * 2)
    device = calibrate.calibrate(2).device
    assert 0 < device.attained < 1
    assert device.flops_per_s == 1e11 and device.memory_bytes_per_s == 1e10 * device.attained
    found = pc.estimate(calibrate._Block(), torch.zeros(calibrate._BATCH), device)
    assert found.seconds == pytest.approx(step_s)


def test_a_device_of_a_file_has_units_and_positive_rates():
    level = '[[level]]\nname = "host"\nsize = 2\nlink_gb_per_s = 1\n'
    with pytest.raises(UsageError, match="'compute' has no unit: expected one of compute_tflop"):
        topology.loads(f"[device]\ncompute = 3\nmemory_gb_per_s = 1\n{level}")
    with pytest.raises(UsageError, match="flops_per_s: expected above 0, got 0"):
        topology.loads(f"[device]\ncompute_gflop_per_s = 0\nmemory_gb_per_s = 1\n{level}")
    assert topology.loads(level).device is None
