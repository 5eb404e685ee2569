"""Gossip: graphs and their contraction, modes, compression, and what a step sends."""

from __future__ import annotations

import io
import math
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from mesh_cases import in_one_world
from torch import nn

import pycoll
from pycoll import UsageError
from pycoll import parallel as pc
from pycoll.parallel.core.lateness import PARTS
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.replicas.times import NeighborTimes

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

N, COUNT = 4, 1000
# By kind of graph: for n = 4, 8, 16, computed once with numpy.linalg from the published weights.
CONTRACTIONS = {
    "complete": (0, 0, 0),
    "exponential": (1 / 3, 0.5, 0.6),
    "ring": (1 / 3, 0.805, 0.949),
    "star": (0.75, 0.875, 0.938),
    "path": (0.805, 0.949, 0.987),
    "one_peer_exponential": (0, 0, 0),
}


@pytest.mark.pure
def test_contractions_are_those_of_the_literature():
    for name, expected in CONTRACTIONS.items():
        found = [getattr(pc.graph, name)(n).contraction for n in (4, 8, 16)]
        assert found == pytest.approx(expected, abs=6e-4), name


@pytest.mark.pure
@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: pc.graph.from_edges(4, [(0, 1), (2, 3)]), r"ranks 0, 1 \| 2, 3 never hear"),
        (lambda: pc.graph.from_edges(3, [(0, 1), (1, 2)], directed=True), r"ranks 0 \| 1 \| 2"),
        (lambda: pc.graph.from_edges(2, [(0, 2)]), r"edge \(0, 2\), expected two of the ranks"),
        (lambda: pc.graph.ring(0), "n is 0"),
        (lambda: pc.graph.random_regular(5, 3), "no graph of 5 ranks has 3 neighbors"),
    ],
)
def test_graphs_that_cannot_train_are_refused(make, text):
    with pytest.raises(UsageError, match=text):
        make()


@pytest.mark.pure
def test_every_graph_keeps_sums_and_random_ones_have_their_degree():
    graphs = [pc.graph.torus(2, 4), pc.graph.exponential(6), pc.graph.star(5)]
    graphs += [pc.graph.random_regular(8, 3, seed) for seed in range(3)]
    for graph in graphs:
        assert graph.matrix(0).sum(0) == pytest.approx(np.ones(graph.size))
        assert graph.is_balanced
    assert {len(graphs[-1].neighbors(rank)) for rank in range(8)} == {3}
    assert not pc.graph.from_edges(3, [(0, 1), (1, 2), (2, 0), (0, 2)], directed=True).is_balanced


def group_of(comm: pycoll.Communicator) -> AxisGroup:
    return AxisGroup.over(comm, "replicas")


def stepped(comm, graph, rounds, mode="dpsgd", compress=None):
    """Distances from the mean after each step without a gradient, the mean, and what was sent."""
    torch.manual_seed(comm.rank)
    weight = nn.Parameter(torch.randn(COUNT, dtype=torch.float64))
    group = group_of(comm)
    inner = torch.optim.SGD([weight], lr=0.0)
    optimizer = pc.gossip(inner, graph, mode, compress=compress, group=group)
    weight.grad = torch.zeros_like(weight)
    distances = []
    for _ in range(rounds):
        optimizer.step()
        distances.append(optimizer.consensus_distance())
    sent = group.ledger.of("replicas", "send")
    with optimizer.mean_weights():
        mean = weight.detach().clone()
    optimizer.close()
    return np.array(distances), mean, (sent.calls, sent.nbytes)


def true_mean() -> torch.Tensor:
    makers = [torch.Generator().manual_seed(rank) for rank in range(N)]
    drawn = [torch.randn(COUNT, dtype=torch.float64, generator=maker) for maker in makers]
    return torch.stack(drawn).mean(0)


def distances_shrink_by_the_contraction(comm):
    for name in ("ring", "star", "path"):
        graph = getattr(pc.graph, name)(N)
        distances, mean, _ = stepped(comm, graph, 20)
        slope = math.log(distances[-1] / distances[-11]) / 10
        assert slope == pytest.approx(math.log(graph.contraction), rel=0.02), name
        assert torch.allclose(mean, true_mean(), atol=1e-12)


def one_peer_is_exact_after_log_n_rounds(comm):
    distances, _, sent = stepped(comm, pc.graph.one_peer_exponential(N), 4)
    assert distances[0] > 1 and distances[1] < 1e-12
    assert sent == (4, 4 * 8 * COUNT)  # one vector a step


def push_sum_finds_the_mean_over_one_way_edges(comm):
    graph = pc.graph.from_edges(N, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)], directed=True)
    distances, mean, sent = stepped(comm, graph, 60, "sgp")
    assert distances[-1] < 1e-8
    assert torch.allclose(mean, true_mean(), atol=1e-8)
    assert sent[0] == 60 * len(graph.targets(comm.rank, 0))
    with pytest.raises(UsageError, match="unequal shares"):
        stepped(comm, graph, 1)


def compressed_gossip_agrees_with_fewer_bytes(comm):
    for compress, share in (("int8", 1.04 / 8), ("topk:0.1", 0.8 / 8)):
        distances, mean, (calls, nbytes) = stepped(comm, pc.graph.ring(N), 60, compress=compress)
        assert distances[-1] < 0.05 * distances[0], compress
        assert torch.allclose(mean, true_mean(), atol=1e-6)
        whole = 2 * 8 * COUNT  # the first exchange
        assert nbytes - whole == pytest.approx((calls - 2) * 8 * COUNT * share, rel=0.001)


def pairs_keep_the_sum_and_wait_for_no_slow_rank(comm):
    torch.manual_seed(comm.rank)
    weight = nn.Parameter(torch.randn(COUNT, dtype=torch.float64))
    inner = torch.optim.SGD([weight], lr=0.0)
    optimizer = pc.gossip(inner, pc.graph.ring(N), "adpsgd", group=group_of(comm))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    comm.barrier()
    begun_s = time.monotonic()
    for _ in range(30):
        optimizer.step()
        time.sleep(0.03 if comm.rank == 0 else 0.001)
    took_s = time.monotonic() - begun_s
    comm.barrier()
    weight.grad.zero_()
    optimizer.close()
    optimizer = pc.gossip(inner, pc.graph.complete(N), group=group_of(comm))
    distance = optimizer.consensus_distance()
    with optimizer.mean_weights():
        assert torch.allclose(weight, true_mean(), atol=1e-12)
    optimizer.close()
    return took_s, distance


def names_of_the_late(comm, replicas, sizes):
    """Rank and part of the late one by each of 8 steps; rank 2 sleeps in each backward pass."""
    mesh = pc.mesh(dp=-1, comm=comm, **sizes)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = pc.parallelize(
        model, mesh, tp={"0": "col", "1": "row"} if sizes else None, replicas=replicas
    )
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].register_full_backward_hook(lambda *_: time.sleep(0.1 * (comm.rank == 2)))
    found, text = [], io.StringIO()
    for _ in range(8):
        model.step(torch.ones(8, 4), torch.ones(8, 2), loss=nn.functional.mse_loss)
        optimizer.step()
        late = optimizer.last.late
        found.append(late and (late.rank, late.part))
        pc.log(optimizer.last, file=text)
    if comm.rank == 0:
        assert "rank 2 is late by 0." in text.getvalue() and "(backward)" in text.getvalue()
    optimizer.close()
    mesh.close()
    return found


CASES = [
    distances_shrink_by_the_contraction,
    one_peer_is_exact_after_log_n_rounds,
    push_sum_finds_the_mean_over_one_way_edges,
    compressed_gossip_agrees_with_fewer_bytes,
]


def run_cases(comm):
    for case in CASES:
        case(comm)


def test_weights_of_neighbors_come_together():
    pycoll.run_ranks(run_cases, N, timeout_s=30)


def test_a_late_replica_is_named_by_all_within_ten_steps():
    """Sleeps of 0.1 s in eight steps of four trainings. Ranks 0 and 2 are not neighbors."""
    cases = [(N, f"gossip:{options}", {}) for options in ("graph=ring", "graph=ring,mode=adpsgd")]
    cases += [(N, "gossip:graph=path,mode=sgp", {}), (N, "gossip:graph=ring", {"tp": 2})]
    for case, outcomes in zip(cases, in_one_world(names_of_the_late, cases), strict=True):
        for found in outcomes[:: case[2].get("tp", 1)]:  # each has the same part of its replica
            assert Counter(found[3:]).most_common(1)[0][0] == (2, "backward"), (case, found)


def test_pairs_do_not_wait_for_a_slow_neighbor():
    """A second: the slow rank sleeps for 0.9 s."""
    found = pycoll.run_ranks(pairs_keep_the_sum_and_wait_for_no_slow_rank, N, timeout_s=30)
    assert found[0][0] >= 0.9
    assert min(took_s for took_s, _ in found[1:]) < 0.7 * found[0][0]
    assert all(distance < 1 for _, distance in found), found


def test_pairs_that_are_aborted_leave_no_thread():
    """As when new ranks come: the old exchange stops, although no rank has ended."""

    def work(comm) -> int:
        weight = nn.Parameter(torch.ones(3))
        graph, group = pc.graph.ring(comm.size), AxisGroup.over(comm, "replicas")
        optimizer = pc.gossip(torch.optim.SGD([weight], lr=0.0), graph, "adpsgd", group=group)
        optimizer.step()
        comm.barrier()
        optimizer.abort("others go on")
        end_s = time.monotonic() + 5
        while left := sum("answer" in one.name for one in threading.enumerate()):
            if time.monotonic() > end_s:
                break
            time.sleep(0.01)
        comm.barrier()
        return left

    assert pycoll.run_ranks(work, 2, timeout_s=20) == [0, 0]


def merge_all(times: NeighborTimes, messages: torch.Tensor) -> None:
    for message in messages:
        times.merge(message)


def test_times_are_read_while_another_thread_merges():
    """torch's nonzero wrote past its end when a thread merged meanwhile."""
    size, parts = 1000, len(PARTS)
    for _ in range(30):
        times = NeighborTimes(0, size)
        coming = torch.ones(20, size, 1 + parts, dtype=torch.float64).cumsum(0)
        for turn, message in enumerate(coming):
            message[50 * (turn + 1) :] = 0
        merging = threading.Thread(target=merge_all, args=(times, coming))
        merging.start()
        while merging.is_alive():
            late = times.late
            assert late is None or late.rank < size
        merging.join()
        assert torch.equal(times.message()[:, 0], coming.amax(0)[:, 0])
