"""Thousands of ranks, one by one and as classes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pycoll
from pycoll import UsageError, topology

pytestmark = pytest.mark.pure

ROOT = Path(pycoll.__file__).parents[1]
EXAMPLES = ROOT / "examples" / "topologies"
GIB = 1 << 30


def test_ring_of_1024_ranks_one_by_one_equals_its_classes():
    cluster = topology.load(EXAMPLES / "nvlink_hosts.toml").resized(1024)
    one_by_one = cluster.simulate("all_reduce", "ring", GIB, compress=False)
    assert one_by_one.num_messages == 1024 * 2 * 1023
    classes = cluster.simulate("all_reduce", "ring", GIB)
    assert classes.num_classes == 8
    assert classes.time_s == pytest.approx(one_by_one.time_s, rel=1e-9)
    # What crosses hosts sets the pace; its latency passes while the next message is made.
    chunk = GIB / 1024
    reduce_s = 1023 * chunk / 1000e9
    assert classes.time_s == pytest.approx(2 * 1023 * (0.5e-6 + chunk / 50e9) + reduce_s, rel=0.01)


def test_10240_ranks_that_behave_identically_take_seconds():
    cluster = topology.load(EXAMPLES / "fat_tree.toml")
    assert cluster.num_ranks == 10_240
    ring, hierarchical, deep = (
        cluster.simulate("all_reduce", name, GIB, **options)
        for name, options in (
            ("ring", {}),
            ("hierarchical", {}),
            ("hierarchical", {"groups": ["host", "rack"]}),
        )
    )
    assert len(ring.rank_time_s) == 10_240
    assert deep.time_s < hierarchical.time_s < ring.time_s
    # 2(m-1), 2(R-1), 2(S-1) rounds inside hosts, racks and the spine.
    left, expected_s = GIB, 0.0
    for size, alpha, rate in ((8, 1e-6, 450e9), (32, 3e-6, 50e9), (40, 6e-6, 12.5e9)):
        left /= size
        expected_s += 2 * (size - 1) * (0.5e-6 + alpha + left / rate) + (size - 1) * left / 1000e9
    assert deep.time_s == pytest.approx(expected_s, rel=0.01)


def test_what_has_too_many_moves_is_refused_before_they_are_made():
    cluster = topology.load(EXAMPLES / "fat_tree.toml")
    with pytest.raises(UsageError, match="of 10240 ranks has too many moves|peers"):
        cluster.simulate("all_reduce", "two_shot", GIB)
    with pytest.raises(UsageError, match="of 10240 ranks has too many moves"):
        cluster.simulate("all_to_all", "bruck", GIB)


def test_progress_is_told_and_what_it_raises_ends_the_simulation():
    world = (
        topology.load(EXAMPLES / "nvlink_hosts.toml")
        .resized(1024)
        .prepare("all_reduce", "ring", compress=False)
    )
    parts = []
    world.simulate(GIB, progress=parts.append)
    assert len(parts) > 4
    assert parts == sorted(parts) and parts[0] >= 0 and parts[-1] <= 1

    def stop(part):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.simulate(GIB, progress=stop)


PROGRAM = """
import pathlib, re, sys
from pycoll import topology
cluster = topology.load(sys.argv[1]).resized(int(sys.argv[2]))
for name in ("hierarchical", "ring"):
    one = cluster.simulate("all_reduce", name, 1 << 30)
    print(one.num_classes, one.num_messages)
# Not ru_maxrss: that begins with the memory of the process that started this one.
status = pathlib.Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) * 1024)
"""


@pytest.mark.parametrize(
    "n", [640, pytest.param(10_240, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_ranks_that_all_differ_are_simulated_one_by_one_in_little_memory(n):
    """Stragglers and jitter make every rank different: 2(n-1)n messages one by one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLES / "stragglers.toml"), str(n)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr
    hierarchical_classes, _, ring_classes, ring_messages, nbytes = map(int, done.stdout.split())
    assert hierarchical_classes == ring_classes == n
    assert ring_messages == n * 2 * (n - 1)
    assert nbytes < (8 << 30 if n > 1000 else 1 << 30)
