"""Loaders: the same batches on every mesh, each sample once, and each rank reads its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mesh_cases import assert_equal_one_process, assert_refused, in_one_world
from tiny_gpt import GPT

from pycoll import parallel as pc

NUM_SAMPLES, BATCH = 23, 6  # the last batch has 5 samples


class Numbers:
    """Sample i is the pair of i and 10 i; counts what is read."""

    def __init__(self, size: int = NUM_SAMPLES) -> None:
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.read.append(i)
        return torch.tensor([i]), 10 * i


def epochs(comm: Any, sizes: dict[str, int], size: int, prefetch: int) -> Any:
    """What this rank has of two epochs, and what it has read."""
    mesh = pc.mesh(**sizes, comm=comm)
    data = Numbers(size)
    loader = pc.loader(data, BATCH, mesh, seed=5, prefetch=prefetch)
    found = [[(x.flatten().tolist(), y.tolist()) for x, y in loader] for _ in range(2)]
    mesh.close()
    return found, data.read, len(loader)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_rank_reads_its_own_samples_and_each_sample_comes_once(prefetch):
    size = NUM_SAMPLES + 2  # the last batch has one sample, so that a share is empty
    ((alone, _, _),) = in_one_world(epochs, [(1, {}, size, prefetch)])[0]
    of_ranks = in_one_world(epochs, [(4, {"dp": 2, "tp": 2}, size, prefetch)])[0]
    assert alone[0] != alone[1]
    for epoch in range(2):
        assert sorted(i for x, _ in alone[epoch] for i in x) == list(range(size))
        for place, (x, y) in enumerate(alone[epoch]):
            shares = [found[epoch][place] for found, _, _ in of_ranks]
            assert shares[0] == shares[1] and shares[2] == shares[3]  # ranks of tp
            assert shares[0][0] + shares[2][0] == x and shares[0][1] + shares[2][1] == y
    for found, read, num_batches in of_ranks:
        assert num_batches == 5 and len(found[0]) == 5
        mine = [i for epoch in found for x, _ in epoch for i in x]
        for_shapes = len(read) - len(mine)
        assert set(mine) <= set(read) and for_shapes in (0, 2)
        assert len(read) <= size + 1 + for_shapes  # half of two epochs


def resumed(comm: Any) -> Any:
    mesh = pc.mesh(dp=-1, comm=comm)
    whole = pc.loader(Numbers(), BATCH, mesh, seed=1)
    expected = [[x.tolist() for x, _ in whole] for _ in range(3)]
    wrong = []
    for stop in range(1, 3 * len(whole)):
        first, count = pc.loader(Numbers(), BATCH, mesh, seed=1), 0
        while count < stop:
            for _ in first:
                count += 1
                if count == stop:
                    break
        second = pc.loader(Numbers(), BATCH, mesh, seed=1)
        second.load_state_dict(first.state_dict())
        rest = [x.tolist() for _ in range(second.epoch, 3) for x, _ in second]
        if rest != [x for epoch in expected for x in epoch][stop:]:
            wrong.append(stop)
    return wrong


def test_a_loader_goes_on_at_its_saved_place():
    assert in_one_world(resumed, [(2,)])[0] == [[], []]


class Tokens:
    def __len__(self) -> int:
        return 14

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(29, (9,), generator=torch.Generator().manual_seed(i))
        return tokens[:-1], tokens[1:]


def train(comm: Any, sizes: dict[str, int], **options: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(fused=True)
    model = pc.parallelize(model, mesh, pp="blocks", **options)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader, losses = pc.loader(Tokens(), 4, mesh, seed=2), []
    for _ in range(2):
        for x, y in loader:
            losses.append(model.step(x, y, loss=pc.cross_entropy).loss)
            optimizer.step()
    weights = pc.whole_weights(model)
    mesh.close()
    return losses, weights


def test_training_with_a_loader_is_the_same_on_every_mesh():
    """With dropout, and a last batch of two samples on three replicas."""
    assert_equal_one_process(train, [({"dp": 3}, {"zero": 1}), ({"cp": 2}, {})])


def test_mistakes_are_refused():
    def of_another(mesh):
        state = pc.loader(Numbers(), BATCH, mesh).state_dict()
        pc.loader(Numbers(), BATCH + 2, mesh).load_state_dict(state)

    assert_refused(
        {
            "pc.shard(batches, mesh) takes any iterable": lambda mesh: pc.loader(
                iter([1]), BATCH, mesh
            ),
            "a batch of 1 samples is smaller than the 2 replicas": lambda mesh: pc.loader(
                Numbers(), 1, mesh
            ),
            "the dataset has no samples": lambda mesh: pc.loader(Numbers(0), BATCH, mesh),
            "the saved place is one with batch 6, expected 8": of_another,
        },
        dp=2,
    )
