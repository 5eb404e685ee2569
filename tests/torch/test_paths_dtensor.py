"""DTensor, tensor parallelism, functional collectives and what torch.compile makes of them."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from group_ranks import BACKEND, run_with_group  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


@pytest.mark.parametrize("n", [2, 3])
def test_every_redistribution_keeps_the_tensor(n):
    """Even and uneven shards; what is partial is the sum (or mean, largest) of the parts."""

    def work() -> int:
        mesh, rank = init_device_mesh("cpu", (n,)), dist.get_rank()
        done = 0
        placements = [Replicate(), Shard(0), Shard(1)]
        dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
        for shape in [(2 * n, 3 * n), (n + 1, 2), (1, 5)]:
            for dtype in dtypes:
                whole = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)
                for old, new in itertools.product(placements, placements):
                    x = distribute_tensor(whole, mesh, [old]).redistribute(mesh, [new])
                    assert torch.equal(x.full_tensor(), whole), (old, new, shape, dtype)
                    done += 1
            for op in ("sum", "avg", "max", "min"):
                parts = [
                    torch.arange(shape[0] * shape[1]).view(shape) * (i + 1.0) for i in range(n)
                ]
                total = {
                    "sum": sum(parts),
                    "avg": sum(parts) / n,
                    "max": torch.stack(parts).amax(0),
                    "min": torch.stack(parts).amin(0),
                }[op]
                for new in placements:
                    x = DTensor.from_local(parts[rank], mesh, [Partial(op)])
                    torch.testing.assert_close(x.redistribute(mesh, [new]).full_tensor(), total)
                    done += 1
        return done

    counts = run_with_group(work, n)
    assert counts == [3 * (4 * 9 + 4 * 3)] * n


def test_two_dimensional_mesh_and_its_slices():
    def work() -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        whole = torch.arange(48.0).view(8, 6)
        x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert torch.equal(x.full_tensor(), whole)
        assert torch.equal(x.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)
        product = x @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate(), Shard(0)])
        torch.testing.assert_close(product.full_tensor(), whole @ whole.T)
        results = []
        for name in ("data", "model"):
            group = mesh[name].get_group()
            y = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(y, group=group)
            results.append(y.item())
        flat = mesh["data", "model"]._flatten("all").get_group()
        y = torch.ones(1)
        dist.all_reduce(y, group=flat)
        return [*results, y.item()]

    assert run_with_group(work, 4) == [[2, 1, 4], [4, 1, 4], [2, 5, 4], [4, 5, 4]]


def test_tensor_parallel_mlp_and_loss_parallel_as_one_process():
    def work() -> float:
        mesh = init_device_mesh("cpu", (2,))

        def make() -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Linear(8, 10))

        alone = make()
        plan = {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
            "3": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        ours = parallelize_module(make(), mesh, plan)
        x, y = torch.randn(6, 8), torch.randint(10, (6,))
        expected = nn.functional.cross_entropy(alone(x), y)
        expected.backward()
        with loss_parallel():
            loss = nn.functional.cross_entropy(ours(x), y)
            loss.backward()
        assert loss.full_tensor().item() == pytest.approx(expected.item(), rel=1e-5)
        pairs = zip(ours.parameters(), alone.parameters(), strict=True)
        return max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)

    assert max(run_with_group(work, 2)) < 1e-6


def all_functional_collectives(x: torch.Tensor, group) -> list[torch.Tensor]:
    """x: shape [4, 3]. Those that gloo has too."""
    n = 2
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
    return [result * n for result in results]


def expected_functional(rank: int) -> list[torch.Tensor]:
    xs = [torch.arange(12.0).view(4, 3) * (i + 1) for i in range(2)]
    total, half = xs[0] + xs[1], slice(2 * rank, 2 * rank + 2)
    results = [
        total,
        torch.maximum(*xs),
        torch.cat(xs),
        torch.cat(xs, 1),
        total[half],
        torch.cat([x[half] for x in xs]),
        xs[1],
        total,
        total + 2,
    ]
    if BACKEND != "gloo":
        results += [
            total / 2,
            torch.cat(xs),
            torch.cat(xs) * 2,
            total[half] / 2,
            total[half],
        ]
    return [result * 2 for result in results]


def check_functional(compiler: str | None) -> int:
    def work() -> int:
        rank = dist.get_rank()
        x = torch.arange(12.0).view(4, 3) * (rank + 1)
        call = all_functional_collectives
        if compiler is not None:
            call = torch.compile(call, backend=compiler, fullgraph=True)
        found = call(x, dist.group.WORLD)
        expected = expected_functional(rank)
        assert len(found) == len(expected)
        for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(ours, theirs, msg=lambda text, i=i: f"{i}: {text}")
        return len(found)

    return min(run_with_group(work, 2))


def test_functional_collectives_give_new_tensors():
    assert check_functional(None) >= 9


def test_functional_collectives_compiled_without_a_code_generator():
    assert check_functional("aot_eager") >= 9


@pytest.mark.slow  # compiles C++
@pytest.mark.timeout(400)
def test_functional_collectives_compiled_by_inductor(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert check_functional("inductor") >= 9


def test_gradients_flow_through_collectives():
    def work() -> list[list[float]]:
        rank = dist.get_rank()
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        gathered = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        (gathered * torch.arange(1.0, 5.0) * (rank + 1)).sum().backward()
        grads = [x.grad.tolist()]
        y = torch.ones(4, requires_grad=True)
        part = funcol.reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)
        (part * (rank + 1)).sum().backward()
        grads.append(y.grad.tolist())
        return grads

    found = run_with_group(work, 2)
    assert found == [[[3.0, 6.0], [1.0, 1.0, 2.0, 2.0]], [[9.0, 12.0], [1.0, 1.0, 2.0, 2.0]]]
