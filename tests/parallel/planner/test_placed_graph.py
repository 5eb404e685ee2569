"""Operators on ranks of their own: delta simulation, and the Markov chain against all places."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest

from pycoll.errors import UsageError
from pycoll.parallel.planner.operator_graph import Edge
from pycoll.parallel.planner.placed_graph import PlacedGraph, Simulated, Task
from pycoll.parallel.planner.search import exhaustive, mcmc

pytestmark = pytest.mark.pure

GRAPHS = 50  # two seconds


def random_graph(seed: int, count: int, world: int, **limits) -> PlacedGraph:
    draw = random.Random(seed)
    nodes = tuple(
        Task(f"n{i}", draw.uniform(0.1, 2), draw.uniform(0.1, 4), draw.randrange(1, 5))
        for i in range(count)
    )
    edges = tuple(
        Edge(source, target, draw.randrange(1, 100), ())
        for target in range(1, count)
        for source in draw.sample(
            range(max(0, target - 4), target), min(target, draw.choice([1, 2]))
        )
    )
    return PlacedGraph(nodes, edges, world, 0.05, draw.choice([20.0, 200.0, 2000.0]), **limits)


def towers(depth: int, world: int) -> PlacedGraph:
    """Two towers of equal operators between an input and a head."""
    nodes = [Task("input", 0.0, 0.0)]
    nodes += [Task(f"{tower}{i}", 1.0, 2.0) for i in range(depth) for tower in "ab"]
    nodes.append(Task("head", 0.5, 1.0))
    edges = [Edge(0, 1, 10, ()), Edge(0, 2, 10, ())]
    edges += [Edge(i, i + 2, 10, ()) for i in range(1, 2 * depth - 1)]
    edges += [Edge(i, 2 * depth + 1, 10, ()) for i in (2 * depth - 1, 2 * depth)]
    return PlacedGraph(tuple(nodes), tuple(edges), world, 0.01, 1000.0)


def naive_s(graph: PlacedGraph, places: tuple[int, ...]) -> float:
    """The time of a step, by relaxing all waits until nothing changes."""
    count = len(graph.nodes)
    order = [(0, i) for i in range(count)] + [(1, i) for i in reversed(range(count))]
    length = {
        (p, i): (n.forward_s, n.backward_s)[p] for i, n in enumerate(graph.nodes) for p in (0, 1)
    }
    waits = [
        (a, b, 0.0) for a, b in itertools.combinations(order, 2) if places[a[1]] == places[b[1]]
    ]
    for edge in graph.edges:
        away = places[edge.source] != places[edge.target]
        message_s = (graph.latency_s + edge.nbytes / graph.link_bytes_per_s) * away
        waits.append(((0, edge.source), (0, edge.target), message_s))
        waits.append(((1, edge.target), (1, edge.source), message_s))
    ends, before = dict(length), {}
    while ends != before:
        before = dict(ends)
        for a, b, message_s in waits:
            ends[b] = max(ends[b], ends[a] + message_s + length[b])
    return max(ends.values())


def test_simulated_seconds_are_the_longest_way_through_the_waits():
    for seed in range(20):
        graph = random_graph(seed, 7, 3)
        draw = random.Random(seed)
        places = tuple(draw.randrange(3) for _ in graph.nodes)
        assert graph.cost(places) == pytest.approx(naive_s(graph, places)), seed


def test_delta_simulation_equals_the_full_one_on_random_proposals():
    """2,000 proposals: equal to the last bit, with less of the work."""
    again = full = 0
    for seed, (count, world) in itertools.product(range(5), ((10, 2), (40, 4))):
        graph, draw = random_graph(seed, count, world), random.Random(seed)
        places = tuple(draw.randrange(world) for _ in range(count))
        delta = Simulated(graph, places)
        delta.simulated = 0
        for _ in range(200):
            moves = graph.neighbors(places)
            places = moves[draw.randrange(len(moves))]
            delta.move(places)
            assert delta.ends == Simulated(graph, places).ends, (seed, places)
        again, full = again + delta.simulated, full + 200 * 2 * count
    print(f"simulated {again} tasks in place of {full}")
    assert again < 0.7 * full


def test_mcmc_finds_the_best_places_of_random_graphs():
    for seed in range(GRAPHS):
        limits = {"memory": 12} if seed % 2 else {}
        graph = random_graph(seed, 6, 2, **limits)
        best, found = exhaustive(graph), mcmc(graph, seed=seed, steps=300, chains=3)
        if best is None:
            assert found is None, seed
            continue
        assert found is not None, seed
        assert graph.cost(found) == graph.cost(best), seed


def test_towers_at_the_same_time_take_half_the_time_of_one_rank():
    graph = towers(4, 2)
    one = graph.cost((0,) * len(graph.nodes))
    found = mcmc(graph, steps=500)
    assert found is not None
    names: dict[str, set[int]] = {}
    for node, rank in zip(graph.nodes, found, strict=True):
        names.setdefault(node.name[0], set()).add(rank)
    assert names["a"] != names["b"]
    assert len(names["a"]) == len(names["b"]) == 1
    assert one == pytest.approx(25.5)
    # A message between input, tower and head is waited for in each pass.
    assert graph.cost(found) == pytest.approx(13.5 + 2 * 0.02)


def test_places_that_do_not_fit_cost_infinity_and_wrong_graphs_raise():
    graph = random_graph(0, 4, 2, memory=1)
    assert math.isinf(graph.cost((0, 0, 0, 0)))
    nodes = (Task("a", 1, 1), Task("b", 1, 1))
    for make, text in (
        (lambda: PlacedGraph((), (), 1), "0 operators"),
        (lambda: PlacedGraph(nodes, (), 0), "0 ranks"),
        (lambda: PlacedGraph(nodes, (Edge(1, 0, 1, ()),), 1), "source < target"),
    ):
        with pytest.raises(UsageError, match=re.escape(text)):
            make()
