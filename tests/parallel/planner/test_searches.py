"""The searches against all points, on random graphs of operators; PipeDream's planner."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from pycoll import UsageError
from pycoll.parallel.planner.operator_graph import Dimension, Edge, Node, OperatorGraph
from pycoll.parallel.planner.replicated_stages import Layer, replicated_stages, stage_s
from pycoll.parallel.planner.search import dp, exhaustive, mcmc, recursive

pytestmark = pytest.mark.pure

GRAPHS = 50


def random_graph(seed: int, *, limited: bool = False) -> OperatorGraph:
    """Two to four products of matrices of random sizes, on four ranks."""
    draw = random.Random(seed)
    nodes = []
    for i in range(draw.randint(2, 4)):
        b, k, n = (draw.choice([8, 16, 32, 64, 128, 256]) for _ in range(3))
        dimensions = (
            Dimension("sample", b, 4 * k * n),
            Dimension("out", n, 4 * b * k, shares=True),
            Dimension("in", k, 4 * b * n, shares=True),
        )
        nodes.append(Node(f"product {i}", dimensions, 4 * k * n))
    edges = []
    for target in range(1, len(nodes)):
        for source in {draw.randrange(target) for _ in range(draw.randint(1, 2))}:
            sample, out, _ = nodes[source].dimensions
            edges.append(Edge(source, target, 4 * sample.length * out.length, ((0, 0), (1, 2))))
    weights = sum(node.weights for node in nodes)
    memory = int(weights * draw.uniform(0.3, 0.9)) if limited else None
    return OperatorGraph(tuple(nodes), tuple(edges), 4, memory)


def cost(graph: OperatorGraph, cuts) -> float:
    return math.inf if cuts is None else graph.cost(cuts)


def test_dynamic_programming_and_markov_chains_find_the_best_cuts():
    """Five seconds: 50 graphs without, and 50 with a limit of memory, and all of their cuts."""
    for seed in range(GRAPHS):
        for limited in (False, True):
            graph = random_graph(seed, limited=limited)
            best = cost(graph, exhaustive(graph))
            assert cost(graph, dp(graph)) == pytest.approx(best), f"dp, seed {seed}"
            if limited is False:
                found = mcmc(graph, seed=seed, steps=250, chains=3)
                assert cost(graph, found) == pytest.approx(best), f"mcmc, seed {seed}"


def test_halving_finds_the_best_cuts_of_most_graphs_and_is_near_in_the_others():
    ratios = []
    for seed in range(GRAPHS + 10):
        graph = random_graph(seed)
        best = cost(graph, exhaustive(graph))
        ratios.append(cost(graph, recursive(graph)) / best if best else 1.0)
    assert sum(ratio <= 1 + 1e-9 for ratio in ratios) >= GRAPHS
    assert max(ratios) <= 1.05


PROFILES = json.loads((Path(__file__).parent / "pipedream_profiles.json").read_text())


def profile(name: str) -> list[Layer]:
    return [Layer(ms / 1e3, output, weights) for ms, output, weights in PROFILES[name]]


# Over one rank, and over data parallelism: PipeDream's own optimizer on these profiles.
@pytest.mark.parametrize(
    "name, ranks, bytes_per_s, shape, over_one, over_replicas",
    [
        ("vgg16", 4, 1e9, "3-1", 3.27, 2.84),
        ("vgg16", 16, 1.25e9, "13-2-1", 12.27, 2.66),
        ("alexnet", 4, 1e9, "3-1", 2.49, 5.98),
        ("alexnet", 16, 1.25e9, "15-1", 5.65, 3.39),
        ("resnet50", 4, 1e9, "2-2", 2.72, 1.15),
        ("gnmt_large", 4, 1e9, "1-1-1-1", 3.80, 7.02),
    ],
)
def test_stages_of_published_profiles(name, ranks, bytes_per_s, shape, over_one, over_replicas):
    layers = profile(name)
    found = replicated_stages(layers, ranks, bytes_per_s)
    assert found.shape == shape
    alone = sum(layer.seconds for layer in layers)
    assert alone / found.seconds == pytest.approx(over_one, abs=0.005)
    replicas_s = stage_s(layers, ranks, bytes_per_s)
    assert replicas_s / found.seconds == pytest.approx(over_replicas, abs=0.005)


def every_plan(layers: list[Layer], ranks: int, bytes_per_s: float) -> float:
    """The time of the best plan, by trying all of them."""
    n, best = len(layers), math.inf
    for count in range(1, min(n, ranks) + 1):
        for cuts in itertools.combinations(range(1, n), count - 1):
            bounds = [0, *cuts, n]
            for replicas in itertools.product(range(1, ranks + 1), repeat=count):
                if sum(replicas) != ranks:
                    continue
                slowest = 0.0
                for first, end, m in zip(bounds, bounds[1:], replicas, strict=False):
                    ends = [at for at in (first, end) if 0 < at < n]
                    moved = [2 * layers[at - 1].output / (bytes_per_s * m) for at in ends]
                    slowest = max(slowest, stage_s(layers[first:end], m, bytes_per_s), *moved, 0)
                best = min(best, slowest)
    return best


def test_stages_with_replicas_are_the_best_of_all():
    for seed in range(40):
        draw = random.Random(seed)
        layers = [
            Layer(draw.uniform(0.1, 1), draw.uniform(0, 1e8), draw.choice([0, 1e7, 4e8]))
            for _ in range(draw.randint(1, 5))
        ]
        ranks = draw.randint(1, 5)
        found = replicated_stages(layers, ranks, 1e9)
        assert found.seconds == pytest.approx(every_plan(layers, ranks, 1e9)), f"seed {seed}"
        assert sum(stage.replicas for stage in found.stages) == ranks
    with pytest.raises(UsageError, match="stages: 2 layers cannot use 4 ranks"):
        replicated_stages([Layer(1, 1, 1)] * 2, 4, 1e9, straight=True)
