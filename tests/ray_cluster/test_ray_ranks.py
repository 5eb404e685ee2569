"""Ranks as Ray actors on two nodes: collectives, roles, deaths and returns, mistakes.

Slow: Ray needs 10 s to start two nodes, and a second for each process that it starts.
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray", reason="pip install 'pycoll[ray]'")

import ray

import pycoll
import pycoll.ray

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Workers of Ray cannot import this file, so functions of it are sent whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10


def all_collectives(job, factor):
    """A sum, a gather and a message around the ring; place and environment of the rank."""
    comm = job.comm
    total = comm.all_reduce(np.arange(5.0) * (comm.rank + factor))
    gathered = comm.all_gather(np.array([comm.rank, job.actor]))
    comm.send(np.array([comm.rank]), (comm.rank + 1) % comm.size)
    before = comm.recv(np.array([-1]), (comm.rank - 1) % comm.size)
    node = ray.get_runtime_context().get_node_id()
    return total.tolist(), gathered.tolist(), int(before[0]), job.role, node, os.getpid()


def trained(job, deaths, is_node_lost=False):
    """Adds up 1 for each rank and step; at each (step, actors) of `deaths`, these are killed.

    Only rank 0's state counts after a death; a restarted process begins with it. If a node is lost,
    the first of the actors kills its raylet, too.
    """
    raylet = os.getppid()
    state = np.zeros(3)  # total, steps, deaths so far
    if job.is_restarted:
        job.comm.broadcast(state, root=0)
    while state[1] < STEPS:
        step, actors = deaths[int(state[2])] if state[2] < len(deaths) else (-1, ())
        if state[1] == step and job.actor in actors:
            if is_node_lost and job.actor == actors[0]:
                os.kill(raylet, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total = job.comm.all_reduce(np.ones(1))[0]
            state += [total, 1, 0]
        except pycoll.PeerDiedError:
            job.recover()
            state[2] += 1
            job.comm.broadcast(state, root=0)
    node = ray.get_runtime_context().get_node_id()
    return {"total": state[0], "actors": job.actors, "new": job.is_restarted, "node": node}


def test_start_without_ray_running_names_its_call():
    with pytest.raises(pycoll.UsageError, match="call ray.init"):
        pycoll.ray.start(2)


def test_ranks_of_a_role_on_one_node_are_consecutive(monkeypatch):
    nodes = dict(enumerate("ABABBA"))
    table = {"bundles_to_node_id": nodes}
    monkeypatch.setattr(pycoll.ray.placement, "placement_group_table", lambda group: table)
    roles = pycoll.ray.placement.roles_of({"server": 2, "worker": 4})
    bundles = pycoll.ray.placement.bundles_by_node(None, roles)
    assert bundles == [0, 1, 2, 5, 3, 4]


def test_ranks_on_two_nodes_compute_together(cluster):
    roles = {"server": 1, "worker": pycoll.ray.Role(3, num_cpus=1)}
    with pycoll.ray.start(roles, strategy="SPREAD") as world:
        found = world.run(all_collectives, 2)
        again = world.run({"server": lambda job: job.role, "worker": lambda job: job.actor})
    assert again == ["server", 1, 2, 3]
    for rank, (total, gathered, before, role, node, _) in enumerate(found):
        assert total == [0, 14, 28, 42, 56]
        assert gathered == [0, 0, 1, 1, 2, 2, 3, 3]  # rank and actor
        assert before == (rank - 1) % 4
        assert role == ("server" if rank == 0 else "worker") and node == world.nodes[rank]
    assert sorted(collections.Counter(world.nodes).values()) == [2, 2]
    free = ray.available_resources().get("CPU")
    deadline = time.monotonic() + 20
    while free != 4 and time.monotonic() < deadline:
        time.sleep(0.1)
        free = ray.available_resources().get("CPU")
    assert free == 4  # the world has given its places back


def test_killed_ranks_are_restarted_and_return(cluster):
    """One rank, and then rank 0 and another one at the same step."""
    with pycoll.ray.start(4, strategy="SPREAD", max_restarts=-1) as world:
        found = world.run(trained, [(5, (1,)), (8, (0, 3))], timeout_s=120)
        assert [of_actor["total"] for of_actor in found] == [4 * STEPS] * 4
        assert [of_actor["new"] for of_actor in found] == [True, True, False, True]
        for of_actor in found:  # the survivors keep their order, the restarted ranks follow
            assert of_actor["actors"][:2] == [2, 1] and set(of_actor["actors"]) == {0, 1, 2, 3}
        assert world.run(lambda job: job.comm.all_reduce(np.ones(1))[0]) == [4] * 4


def test_ranks_of_a_lost_node_return_on_another(cluster):
    """Some ten seconds more: until Ray counts the node as lost."""
    of_node = {"num_cpus": 2, "object_store_memory": 80 << 20, "resources": {"place": 2}}
    lost = cluster.add_node(**of_node)
    tail = pycoll.ray.Role(2, resources={"place": 1})
    roles = {"head": 3, "tail": tail}
    with pycoll.ray.start(roles, max_restarts=-1, timeout_s=100) as world:
        assert world.nodes[3:] == [lost.node_id] * 2
        spare = cluster.add_node(**of_node)
        found = world.run(trained, [(5, (3, 4))], True, timeout_s=200)
        assert [of_actor["total"] for of_actor in found] == [5 * STEPS] * 5
        assert [of_actor["node"] for of_actor in found[3:]] == [spare.node_id] * 2


def test_survivors_go_on_without_a_rank_that_is_not_restarted(cluster):
    with pycoll.ray.start(3, strategy="SPREAD") as world:
        found = world.run(trained, [(5, (1,))], return_errors=True, timeout_s=120)
    assert [of_actor["actors"] for of_actor in (found[0], found[2])] == [[0, 2]] * 2
    assert found[0]["total"] == 5 * 3 + (STEPS - 5) * 2
    assert isinstance(found[1], pycoll.PeerDiedError) and found[1].rank == 1
    assert str(found[1]).startswith(f"run: rank 1 on node {world.nodes[1][:8]} died: ")


def test_example_trains_through_a_death(cluster):
    pytest.importorskip("sklearn")
    options = ["--ranks", "4", "--kill", "2", "--address", cluster.address]
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "on_ray.py", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "4 ranks: accuracy 0.9" in done.stdout


def test_first_failure_is_raised_and_ends_the_other_ranks(cluster):
    def failing(job):
        if job.comm.rank == 2:
            raise KeyError("no such shard")
        job.comm.barrier()

    with pycoll.ray.start(3) as world:
        begun_s = time.monotonic()
        with pytest.raises(KeyError, match="no such shard"):
            world.run(failing)
        assert time.monotonic() - begun_s < 30  # not the deadline of operations
        with pytest.raises(pycoll.TimeoutError, match="run: rank 0, 1, 2 did not return within"):
            world.run(lambda job: time.sleep(60), timeout_s=0.2)


def test_mistakes_are_named_in_one_sentence(cluster):
    Role = pycoll.ray.Role
    mistakes = {
        "start: ranks of role 'rank' is 0, expected a whole number from 1": lambda: start(0),
        "start: there are no roles, expected at least one": lambda: start({}),
        "start: role 'a' needs no resources": lambda: start({"a": Role(1, num_cpus=0)}),
        "start: CPU of role 'a' is -1": lambda: start({"a": Role(1, num_cpus=-1)}),
        "start: number of ranks is 400, expected": lambda: start({"a": 200, "b": 200}),
        "start: strategy is 'NEAR', expected one of PACK": lambda: start(2, strategy="NEAR"),
        "start: max_restarts is -2, expected": lambda: start(2, max_restarts=-2),
        "start: 9 ranks found no place within 1 s by PACK: they need 9 CPU; free on": lambda: start(
            9, timeout_s=1
        ),
    }
    start = pycoll.ray.start
    for text, mistake in mistakes.items():
        with pytest.raises(pycoll.Error) as raised:
            mistake()
        assert str(raised.value).startswith(text) and "\n" not in str(raised.value)
    no_role = pytest.raises(pycoll.UsageError, match="run: fn is .*one for each role: a, b")
    with start({"a": 1, "b": 1}) as world, no_role:
        world.run({"a": print})
