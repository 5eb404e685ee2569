"""State dicts of parallelized models: right, or refused; torch.distributed.checkpoint both ways."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from tiny_gpt import GPT, PLAN, batches
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import pycoll
from pycoll import parallel as pc
from pycoll.parallel.core.placement import Placement
from pycoll.parallel.trainer.state_dicts import Parts

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

ROOM = 1e-12


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 4),
    st.data(),
)
def test_boxes_hold_each_element_once(shape, a, b, dim, data):
    whole = torch.arange(math.prod(shape)).view(shape)
    placement = Placement(tuple(shape))
    if dim < len(shape):
        cuts = sorted(data.draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=4)))
        placement = Placement(tuple(shape), dim, tuple(zip(cuts[::2], cuts[1::2], strict=False)))
    flat = placement.take(whole).reshape(-1)
    start, stop = sorted((a % (len(flat) + 1), b % (len(flat) + 1)))
    parts = Parts.of(flat[start:stop], placement, start, saved_here=True)
    assert parts.shape == whole.shape
    found = []
    for box in parts.boxes:
        there = tuple(
            slice(at, at + size) for at, size in zip(box.offsets, box.values.shape, strict=True)
        )
        assert torch.equal(whole[there], box.values)
        found += box.values.flatten().tolist()
    assert sorted(found) == sorted(flat[start:stop].tolist())


def made(comm: pycoll.Communicator, seed: int, zero: int, **sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    model = GPT(dim=16, depth=2).double()
    mesh = pc.mesh(dp=-1, comm=comm, **sizes)
    return pc.parallelize(model, mesh, tp=PLAN, pp="blocks", zero=zero)


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return GPT(dim=16, depth=2).double().state_dict()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    """Two steps."""
    for x, y in itertools.islice(batches(first + 2, 4), first, None):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizers_round_trip(model: nn.Module, plain: nn.Module, folder: str) -> None:
    """Both have the same weights; states move between them, and both go on equally."""
    for one in (model, plain):
        one.eval()  # without dropout
    adam = lambda one, lr=0.01: torch.optim.AdamW(one.parameters(), lr=lr)  # noqa: E731
    ours, theirs = pc.optimizer(adam(model)), adam(plain)
    trained(model, ours, 0)
    trained(plain, theirs, 0)
    dcp.save({"of": pc.optimizer_state_dict(ours)}, checkpoint_id=f"{folder}/steps_of_pycoll")
    dcp.save(
        {"of": get_optimizer_state_dict(plain, theirs)}, checkpoint_id=f"{folder}/steps_of_torch"
    )
    expected = get_optimizer_state_dict(plain, theirs)
    theirs = adam(plain, lr=1.0)
    state = {"of": get_optimizer_state_dict(plain, theirs)}
    dcp.load(state, checkpoint_id=f"{folder}/steps_of_pycoll")
    set_optimizer_state_dict(plain, theirs, state["of"])
    found = get_optimizer_state_dict(plain, theirs)["state"]
    for name, of in expected["state"].items():
        for key, value in of.items():
            assert torch.allclose(found[name][key], value, atol=ROOM, rtol=0), (name, key)
    ours = pc.optimizer(adam(model, lr=1.0))
    before = pc.whole_weights(model)
    state = {"of": pc.optimizer_state_dict(ours)}
    same(pc.whole_weights(model), before)
    dcp.load(state, checkpoint_id=f"{folder}/steps_of_torch")
    pc.load_optimizer_state_dict(ours, state["of"])
    assert ours.param_groups[0]["lr"] == 0.01
    trained(model, ours, 2)
    theirs = adam(plain)
    set_optimizer_state_dict(plain, theirs, expected)
    trained(plain, theirs, 2)
    after = pc.whole_weights(model)
    for name, value in plain.state_dict().items():
        assert torch.allclose(after[name], value, atol=1e-10, rtol=0), name
    two_groups = {**expected, "param_groups": expected["param_groups"] * 2}
    with pytest.raises(pycoll.UsageError, match="the state has 2 groups of parameters, expected 1"):
        pc.load_optimizer_state_dict(ours, two_groups)
    with pytest.raises(pycoll.UsageError, match="there is no state of"):
        pc.load_optimizer_state_dict(ours, {**expected, "state": {}})


def round_trip(comm: pycoll.Communicator, folder: str) -> None:
    """torch's checkpoint of a plain model, and pycoll's on tp2 x zero 3, both ways."""
    store = dist.FileStore(f"{folder}/store", comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    model = made(comm, 1, 3, tp=2)
    dcp.save(pc.state_dict(model), checkpoint_id=f"{folder}/of_pycoll")
    plain = GPT(dim=16, depth=2).double()
    read = plain.state_dict()
    dcp.load(read, checkpoint_id=f"{folder}/of_pycoll")
    same(read, weights(1))

    plain.load_state_dict(weights(2))
    dcp.save(plain.state_dict(), checkpoint_id=f"{folder}/of_torch")
    state = pc.state_dict(model)
    dcp.load(state, checkpoint_id=f"{folder}/of_torch")
    pc.load_state_dict(model, state)
    same(pc.whole_weights(model), weights(2))
    optimizers_round_trip(model, plain, folder)
    dist.destroy_process_group()


def test_torch_checkpoints_are_written_and_read_on_tp2_zero3(tmp_path):
    """Seconds: four ranks import torch.distributed's checkpoints."""
    pycoll.run_ranks(round_trip, 4, str(tmp_path), timeout_s=60)


def habits(comm: pycoll.Communicator) -> None:
    for zero, sizes in [(0, {"tp": 2}), (3, {}), (0, {"pp": 2})]:
        model = made(comm, 1, zero, **sizes)
        with pytest.raises(pycoll.UsageError, match=r"this rank has parts .* pc\.whole_weights"):
            model.state_dict()
        with pytest.raises(pycoll.UsageError, match=r"pc\.load_state_dict"):
            model.load_state_dict(weights(2))
        with pytest.raises(pycoll.UsageError, match="is missing, expected shape"):
            pc.load_state_dict(model, {})
        with pytest.raises(pycoll.UsageError, match="parts of tensors"):
            sum(value.sum() for value in pc.state_dict(model).values())
        pc.load_state_dict(model, weights(2))
        same(pc.whole_weights(model), weights(2))
    for zero in (0, 1, 2):  # whole parameters: torch's own functions are right
        model = made(comm, 1, zero)
        same(model.state_dict(), weights(1))
        model.load_state_dict(weights(2))
        optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        model.step(tokens, tokens, loss=pc.cross_entropy)
        optimizer.step()  # would bring back what the optimizer holds
        same(model.state_dict(), weights(2))


def test_state_dicts_of_parts_are_refused_and_those_of_whole_models_work():
    pycoll.run_ranks(habits, 2, timeout_s=60)
