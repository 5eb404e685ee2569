"""Thousands of ranks, one by one and as classes."""

import os
import subprocess
import sys
import time
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
    began_s = time.process_time()
    one_by_one = cluster.simulate("all_reduce", "ring", GIB, compress=False)
    assert one_by_one.num_messages == 1024 * 2 * 1023
    assert time.process_time() - began_s < 30
    classes = cluster.simulate("all_reduce", "ring", GIB)
    assert classes.num_classes == 8
    assert classes.time_s == pytest.approx(one_by_one.time_s, rel=1e-9)
    # What crosses hosts sets the pace; its latency passes while the next message is made.
    chunk = GIB / 1024
    reduce_s = 1023 * chunk / 1000e9
    assert classes.time_s == pytest.approx(2 * 1023 * (0.5e-6 + chunk / 50e9) + reduce_s, rel=0.01)


def test_10240_ranks_that_behave_alike_take_seconds():
    cluster = topology.load(EXAMPLES / "fat_tree.toml")
    assert cluster.num_ranks == 10_240
    began_s = time.process_time()
    ring, hierarchical, deep = (
        cluster.simulate("all_reduce", name, GIB, **options)
        for name, options in (
            ("ring", {}),
            ("hierarchical", {}),
            ("hierarchical", {"groups": ["host", "rack"]}),
        )
    )
    assert time.process_time() - began_s < 60
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
    began_s = time.process_time()
    with pytest.raises(UsageError, match="of 10240 ranks has too many moves|peers"):
        cluster.simulate("all_reduce", "two_shot", GIB)
    with pytest.raises(UsageError, match="of 10240 ranks has too many moves"):
        cluster.simulate("all_to_all", "bruck", GIB)
    assert time.process_time() - began_s < 20


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
import resource, sys, time
from pycoll import topology
cluster = topology.load(sys.argv[1]).resized(10_240)
began_s = time.process_time()
for name in ("hierarchical", "ring"):
    one = cluster.simulate("all_reduce", name, 1 << 30)
    assert one.num_classes == 10_240
    print(name, one.time_s, one.num_messages)
print(time.process_time() - began_s)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_10240_ranks_that_all_differ_take_minutes_of_one_core_and_little_memory():
    """Stragglers and jitter leave no two ranks alike: 2(n-1)n messages one by one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLES / "stragglers.toml")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    *rows, cpu_s, nbytes = done.stdout.split()
    assert rows[5] == str(10_240 * 2 * 10_239)
    assert float(cpu_s) < 300
    assert int(nbytes) < 8 << 30
