"""DTensor, tensor parallelism, functional collectives and what torch.compile makes of them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch_ranks import BACKEND, on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


@on_ranks(2, 3)
def test_every_redistribution_keeps_the_tensor(rank, n):
    """Even and uneven shards; what is partial is the sum (or mean, largest) of the parts."""
    mesh = init_device_mesh("cpu", (n,))
    placements = [Replicate(), Shard(0), Shard(1)]
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    for shape in [(2 * n, 3 * n), (n + 1, 2), (1, 5)]:
        numbers = torch.arange(shape[0] * shape[1]).view(shape)
        for dtype, old, new in itertools.product(dtypes, placements, placements):
            whole = numbers.to(dtype)
            x = distribute_tensor(whole, mesh, [old]).redistribute(mesh, [new])
            assert torch.equal(x.full_tensor(), whole), (old, new, shape, dtype)
        parts = torch.stack([numbers * (i + 1.0) for i in range(n)])
        totals = {
            "sum": parts.sum(0),
            "avg": parts.mean(0),
            "max": parts.amax(0),
            "min": parts.amin(0),
        }
        for (op, total), new in itertools.product(totals.items(), placements):
            x = DTensor.from_local(parts[rank], mesh, [Partial(op)])
            torch.testing.assert_close(x.redistribute(mesh, [new]).full_tensor(), total)


@on_ranks(4)
def test_two_dimensional_mesh_shards_and_multiplies(rank, n):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    whole = torch.arange(48.0).view(8, 6)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(x.full_tensor(), whole)
    assert torch.equal(x.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)
    product = x @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate(), Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.T)


def make_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Linear(8, 10))


@on_ranks(2)
def test_tensor_parallel_mlp_and_loss_parallel_as_one_process(rank, n):
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(),
        "3": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    alone, ours = make_mlp(), parallelize_module(make_mlp(), init_device_mesh("cpu", (n,)), plan)
    x, y = torch.randn(6, 8), torch.randint(10, (6,))
    expected = nn.functional.cross_entropy(alone(x), y)
    expected.backward()
    with loss_parallel():
        loss = nn.functional.cross_entropy(ours(x), y)
        loss.backward()
    assert loss.full_tensor().item() == pytest.approx(expected.item(), rel=1e-5)
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    assert max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs) < 1e-6


def functional_collectives(x: torch.Tensor, group) -> list[torch.Tensor]:
    """Results for x of shape [4, 3] on 2 ranks; Gloo has the first nine."""
    results = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_reduce(x, "max", group),
        funcol.all_gather_tensor(x, 0, group),
        funcol.all_gather_tensor(x, 1, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.all_to_all_single(x, None, None, group),
        funcol.broadcast(x, 1, group),
        *funcol.all_reduce_coalesced([x, x + 1], "sum", group),
    ]
    if BACKEND != "gloo":
        results += [
            funcol.all_reduce(x, "avg", group),
            *funcol.all_gather_into_tensor_coalesced([x, x * 2], group),
            *funcol.reduce_scatter_tensor_coalesced([x, x * 2], "avg", [0, 0], group),
        ]
    return [result * 2 for result in results]


def check_functional(rank: int, compiler: str | None) -> None:
    xs = [torch.arange(12.0).view(4, 3) * (i + 1) for i in range(2)]
    total, half = xs[0] + xs[1], slice(2 * rank, 2 * rank + 2)
    whole, halves = torch.cat(xs), torch.cat([x[half] for x in xs])
    expected = [total, torch.maximum(*xs), whole, torch.cat(xs, 1), total[half], halves, xs[1]]
    expected += [total, total + 2]
    if BACKEND != "gloo":
        expected += [total / 2, whole, whole * 2, total[half] / 2, total[half]]
    call = functional_collectives
    if compiler is not None:
        call = torch.compile(call, backend=compiler, fullgraph=True)
    found = call(xs[rank], dist.group.WORLD)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(ours, theirs * 2, msg=lambda text, i=i: f"{i}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@on_ranks(2)
def test_functional_collectives_give_new_tensors_with_and_without_a_graph(rank, n, compiler):
    check_functional(rank, compiler)


@pytest.mark.slow  # compiles C++
@on_ranks(2)
def test_functional_collectives_compiled_by_inductor(rank, n, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        patch.setattr("torch._inductor.config.compile_threads", 1)  # forks have no pool
        patch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
        check_functional(rank, "inductor")


@on_ranks(2)
def test_gradients_flow_through_collectives(rank, n):
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    gathered = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    (gathered * torch.arange(1.0, 5.0) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [[3.0, 6.0], [9.0, 12.0]][rank]
    y = torch.ones(4, requires_grad=True)
    part = funcol.reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)
    (part * (rank + 1)).sum().backward()
    assert y.grad.tolist() == [1.0, 1.0, 2.0, 2.0]
