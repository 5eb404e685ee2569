"""Tensors used repeatedly are registered in shared memory; only their speed shows it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_ranks import init, on_ranks, same

import pycoll.torch

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

COUNT = 1 << 18  # of float32: 1 MiB
USES = pycoll.torch.Options().register_after


def is_shared(x: torch.Tensor) -> bool:
    """Whether the middle of the tensor lies in memory that other processes map, too."""
    address = x.data_ptr() + x.nbytes // 2
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1].endswith("s")
    raise AssertionError("not mapped")


def pass_often(x: torch.Tensor, times: int = USES) -> None:
    """Leaves the values as they are."""
    for _ in range(times):
        dist.all_reduce(x, dist.ReduceOp.MAX)


def test_there_is_a_default_where_there_is_no_gpu():
    assert (0 if torch.cuda.is_available() else 8) == USES


@pytest.mark.parametrize("offset", [0, 3])
@on_ranks(2)
def test_tensor_used_repeatedly_moves_once_and_keeps_address_and_values(rank, n, offset):
    whole = torch.arange(COUNT + 8, dtype=torch.float32)
    before = whole.clone()
    x = whole[offset : offset + COUNT]
    address = x.data_ptr()
    pass_often(x, USES - 1)
    assert not is_shared(x)
    pass_often(x, 1)
    assert is_shared(x) and x.data_ptr() == address
    same(whole, before)
    for _ in range(3):
        x += rank
        dist.all_reduce(x)
        before[offset : offset + COUNT] = 2 * before[offset : offset + COUNT] + 1
        same(whole, before)
    del x, whole
    y = torch.ones(COUNT + 8)  # most likely where the other was
    assert not is_shared(y) and y.sum() == COUNT + 8


@on_ranks(2)
def test_tensors_move_wherever_they_lie_beside_each_other(rank, n):
    # As malloc lays them side by side, 4 MiB and its header apart, and at other distances.
    kept = [torch.zeros((1 << 20) + 16 * apart) for apart in range(8) for _ in range(2)]
    for x, y in itertools.pairwise(kept):
        for _ in range(USES):
            dist.all_reduce(x)
            dist.all_reduce(y)
    assert all(is_shared(each) for each in kept)


def test_variable_that_cannot_be_read_is_an_error(monkeypatch):
    monkeypatch.setenv("PYCOLL_REGISTER_AFTER", "often")
    with pytest.raises(ValueError, match="PYCOLL_REGISTER_AFTER=often: expected a number from 0"):
        pycoll.torch.Options()


@on_ranks(2)
def test_operations_that_are_queued_meanwhile_lose_nothing(rank, n):
    x = torch.ones(COUNT)
    works = [dist.all_reduce(x, async_op=True) for _ in range(2 * USES)]
    for each in works:
        each.wait()
    assert is_shared(x)
    same(x, torch.full((COUNT,), float(2 ** (2 * USES))))


@on_ranks(2)
def test_forked_process_has_its_own_copy(rank, n):
    x, plain = torch.full((COUNT,), 7.0), torch.full((COUNT,), 7.0)
    pass_often(x)
    assert is_shared(x) and not is_shared(plain)
    to_child, from_parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(to_child, 1)
        ok = not is_shared(x) and bool((x == 7).all())
        x.fill_(3)
        del x
        os._exit(0 if ok else 1)
    x.fill_(5)
    os.write(from_parent, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert bool((x == 5).all()) and is_shared(x)
    pass_often(x)
    assert bool((x == 5).all())


@on_ranks(2)
def test_memory_of_others_stays_where_it_is(rank, n):
    array = np.zeros(COUNT, np.float32)
    of_numpy = torch.from_numpy(array)
    small = torch.zeros(1000)
    new = []
    for _ in range(2 * USES):
        dist.all_reduce(of_numpy)
        dist.all_reduce(small)
        new.append(torch.zeros(COUNT))
        dist.all_reduce(new[-1])
    assert not is_shared(of_numpy) and not is_shared(small)
    assert not any(is_shared(each) for each in new)


@on_ranks(2)
def test_tensor_may_outlive_its_group_and_change_its_storage(rank, n):
    x = torch.full((COUNT,), 2.0)
    pass_often(x)
    y = torch.full((COUNT,), 4.0)
    pass_often(y)
    y.untyped_storage().resize_(8 * COUNT)
    assert not is_shared(y) and y[-1] == 4 and y[0] == 4
    dist.destroy_process_group()
    assert is_shared(x) and bool((x == 2).all())
    x += 1
    z = x.clone().share_memory_()
    assert z[5] == 3
    x.untyped_storage().resize_(0)
    del x


@on_ranks(2, group=False)
def test_option_decides_and_reaches_split_groups(rank, n, tmp_path):
    never = pycoll.torch.Options(register_after=0)
    init(rank, n, tmp_path / "store", pg_options=never)
    x, y = torch.zeros(COUNT), torch.zeros(COUNT)
    pass_often(x, 20)
    assert not is_shared(x)
    soon = dist.new_group(pg_options=pycoll.torch.Options(register_after=1))
    dist.all_reduce(y, group=soon)
    assert is_shared(y)
    part = soon.split_group([0, 1], group_name="part")
    part.allreduce([x]).wait()
    assert is_shared(x)
    pass_often(x, 3)  # shared by one group, of no use to another, and no harm
    dist.destroy_process_group()


@on_ranks(3)
def test_gathers_and_scatters_reach_tensors_of_both_ends(rank, n):
    x, out = torch.full((COUNT,), float(rank)), torch.empty(n * COUNT)
    parts = list(torch.empty(n * COUNT).chunk(n))
    for _ in range(USES + 2):
        dist.all_gather_into_tensor(out, x)
        dist.all_gather(parts, x)
        assert out[::COUNT].tolist() == list(range(n)) == [part[9] for part in parts]
        mine = torch.empty(COUNT)
        dist.reduce_scatter_tensor(mine, out)
        assert mine[-1] == n * rank
    assert is_shared(x) and is_shared(out)
