"""Virtual replicas: the bits of the weights do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from points import Points
from torch import nn
from worlds import Comm, end_worlds, run

import pycoll
from pycoll import parallel as pc
from pycoll.parallel.core.dealing import Dealing
from pycoll.parallel.features.data.fixed_sum import Tree

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def worlds_end() -> Iterator[None]:
    yield
    end_worlds()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 3)
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def weights(comm: Comm, zero: int, axes: dict[str, int], of: int) -> tuple[Any, list[float]]:
    """Weights and losses after an epoch of batches of 13 samples, which no number divides."""
    torch.manual_seed(0)
    mesh = pc.mesh(comm=comm, virtual_replicas=of, **axes)
    tp = {"blocks.0": "col", "blocks.2": "row"} if mesh.size("tp") > 1 else None
    model = Net().double()
    model = pc.parallelize(model, mesh, zero=zero, tp=tp, pp="blocks", bucket_mb=0.005)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for x, y in pc.loader(Points(), 13, mesh):
        losses.append(model.step(x, y, loss=nn.functional.cross_entropy, microbatches=2).loss)
        optimizer.step()
    return {name: x.tolist() for name, x in pc.whole_weights(model).items()}, losses


@pytest.mark.parametrize(
    ("zero", "axes", "sizes"),
    [(0, {}, (1, 3, 4)), (1, {}, (1, 3, 4)), (3, {}, (1, 3)), (1, {"pp": 2}, (2, 4)),
     (0, {"tp": 2}, (2, 4))],
    ids=["dp", "zero 1", "zero 3", "pp", "tp"],
)  # fmt: skip
def test_bits_are_those_of_any_number_of_replicas(zero, axes, sizes):
    """Also with more replicas than virtual ones: 3 of them for 4 ranks."""
    found = [run(weights, size, zero, axes, 3) for size in sizes]
    assert all(of_rank == found[0][0] for of_size in found for of_rank in of_size)
    (plain,) = run(weights, 1, 0, {}, 0)
    assert found[0][0][1] == pytest.approx(plain[1], rel=1e-12)


@pytest.mark.pure
@settings(deadline=None)
@given(st.integers(1, 33), st.integers(1, 12), st.integers(0, 9))
def test_sum_has_the_same_bits_for_any_number_of_ranks(num_leaves, num_ranks, seed):
    leaves = torch.randn(num_leaves, dtype=torch.float64, generator=torch.manual_seed(seed))

    def total(ranks: int) -> float:
        together: Tree[torch.Tensor] = Tree(num_leaves)
        for rank in range(ranks):
            mine: Tree[torch.Tensor] = Tree(num_leaves)
            for number in Dealing(ranks, rank, num_leaves).parts_of(rank):
                mine.add(0, number, leaves[number].clone())
            for key, value in mine.nodes.items():
                together.add(*key, value)
        ((_, value),) = together.nodes.items()
        return float(value)

    assert total(num_ranks) == total(1) == pytest.approx(float(leaves.sum()))


@pytest.mark.pure
@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 9))
def test_each_sample_is_dealt_to_one_replica(size, num_replicas, num_virtual):
    spans = [Dealing(num_replicas, rank, num_virtual).samples(size) for rank in range(num_replicas)]
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(size))


def test_what_depends_on_the_number_of_replicas_is_refused():
    mesh = pc.mesh(virtual_replicas=2)
    x, y = torch.ones(4, 5), torch.zeros(4, dtype=torch.int64)
    norms = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    with pytest.raises(pycoll.UsageError, match="with batch normalization the bits depend"):
        pc.parallelize(norms, mesh)
    model = pc.parallelize(nn.Linear(5, 3), mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(pycoll.UsageError, match="clip needs sums over all ranks"):
        pc.optimizer(sgd, clip=1.0)
    with pytest.raises(pycoll.UsageError, match="call model.step"):
        model(x)
    with model.no_sync(), pytest.raises(pycoll.UsageError, match="adds gradients up over steps"):
        model.step(x, y, loss=nn.functional.cross_entropy)
    with pytest.raises(pycoll.UsageError, match="virtual_replicas is -1"):
        pc.mesh(virtual_replicas=-1)
