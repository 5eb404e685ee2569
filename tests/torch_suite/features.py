"""Probes of what users of torch.distributed call, for the table in docs/torch.md.

`python tests/torch_suite/features.py` runs every probe with Gloo and with pycoll, each in fresh
ranks, and writes features.json. A probe checks the values that it gets.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "features.json"
BACKENDS = ("gloo", "pycoll")

sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "torch")]

import feature_cells as cells  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from feature_cells import NUM_RANKS, same  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import init, run_group  # noqa: E402


def tensors_that_are_not_contiguous() -> None:
    x = torch.zeros(3, 4)
    x[:, 1] = dist.get_rank() + 1.0
    dist.all_reduce(x[:, 1])
    same(x[:, 1], torch.full((3,), 3.0))
    assert x.sum() == 9


def tensors_without_elements() -> None:
    x = torch.empty(0, 3)
    dist.all_reduce(x)
    parts = [torch.empty(0, 3) for _ in range(NUM_RANKS)]
    dist.all_gather(parts, x)


def all_gather_of_different_sizes() -> None:
    rank = dist.get_rank()
    parts = [torch.zeros(i + 1) for i in range(NUM_RANKS)]
    dist.all_gather(parts, torch.full((rank + 1,), rank + 1.0))
    assert [p.tolist() for p in parts] == [[1.0], [2.0, 2.0]]


def reduce_scatter_of_different_sizes() -> None:
    x = torch.zeros(dist.get_rank() + 1)
    dist.reduce_scatter(x, [torch.ones(i + 1) for i in range(NUM_RANKS)])
    same(x, torch.full_like(x, 2))


def all_to_all_of_different_sizes() -> None:
    rank = dist.get_rank()
    x, sizes = torch.full((3,), float(rank)), [[1, 2], [2, 1]][rank]
    y = torch.zeros(3)
    dist.all_to_all_single(y, x, sizes, sizes)
    same(y, torch.tensor([0.0] * sizes[0] + [1.0] * sizes[1]))


def output_list_of_one_tensor_is_refused() -> None:
    """`[x] * n`: one tensor for the parts of all ranks."""
    try:
        dist.all_gather([torch.zeros(2)] * NUM_RANKS, torch.ones(2))
    except ValueError:
        return
    raise AssertionError("taken; what is in the tensor is chance")


def recv_from_any_source() -> None:
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        assert dist.recv(x) == 1
        same(x, torch.ones(1))
    else:
        dist.send(torch.ones(1), 0)


def batch_isend_irecv() -> None:
    x, peer = torch.zeros(1), 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, x, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(x, torch.ones(1))


def coalescing_manager() -> None:
    xs = [torch.ones(2), torch.ones(3)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    assert all(bool((x == 2).all()) for x in xs)


def object_collectives() -> None:
    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    assert found == [{"rank": 0}, {"rank": 1}]


def monitored_barrier() -> None:
    dist.monitored_barrier()


def timeout_of_a_group() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 0:
        try:
            dist.barrier(group)
        except RuntimeError as error:
            assert "Timed out" in str(error)
        else:
            raise AssertionError("no error")
    else:
        time.sleep(3)


def another_shape_on_one_rank_is_named() -> None:
    """On every rank, before the time-out, by an error that has both shapes."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group)
    except RuntimeError as error:
        assert "3" in str(error) and "4" in str(error), str(error)
    else:
        raise AssertionError("no error: wrong values")


def split_of_a_group() -> None:
    parent = dist.group.WORLD
    backend = parent._get_backend(torch.device("cpu"))
    assert backend.supports_splitting, "not supported"


def ddp() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
    same(model.module.weight.grad, torch.full((1, 3), 1.5))


def ddp_at_debug_level_detail() -> None:
    dist.destroy_process_group()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    init(int(os.environ["FEATURES_RANK"]), NUM_RANKS, Path(os.environ["FEATURES_STORE"]))
    ddp()


def sync_batch_norm_of_torch() -> None:
    model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm(3))
    model(torch.rand(4, 3)).sum().backward()


def sync_batch_norm_of_pycoll() -> None:
    from pycoll.torch.sync_batch_norm import SyncBatchNorm

    model = nn.parallel.DistributedDataParallel(SyncBatchNorm(3))
    x = torch.full((2, 3), 2.0 * dist.get_rank())
    expected = torch.full_like(x, 2.0 * dist.get_rank() - 1)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-4)


def _fsdp(prepare: Callable[[Any], None], expected: float, *shape: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 5, bias=False)
    names = ("replicas", "shards")[2 - max(1, len(shape)) :]
    mesh = init_device_mesh("cpu", shape or (NUM_RANKS,), mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    prepare(model)
    model(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((5, 3), expected))


def fsdp2() -> None:
    _fsdp(lambda model: None, 1.5)


def fsdp2_over_two_axes() -> None:
    _fsdp(lambda model: None, 1.5, NUM_RANKS, 1)


def fsdp2_set_gradient_divide_factor() -> None:
    _fsdp(lambda model: model.set_gradient_divide_factor(4.0), 0.75)


def fsdp2_memory_of_the_process_group() -> None:
    _fsdp(lambda model: model.set_allocate_memory_from_process_group_for_comm(True), 1.5)


def dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole, mesh = torch.arange(12.0).view(3, 4), init_device_mesh("cpu", (NUM_RANKS,))
    x = distribute_tensor(whole, mesh, [Shard(0)])
    for placement in (Shard(1), Replicate(), Shard(0)):
        x = x.redistribute(mesh, [placement])
        same(x.full_tensor(), whole)


def functional_collectives_compiled() -> None:
    import torch.distributed._functional_collectives as funcol

    def call(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", dist.group.WORLD) * 2

    same(
        torch.compile(call, backend="aot_eager", fullgraph=True)(torch.ones(3)),
        torch.full((3,), 4.0),
    )


def pipeline_1f1b() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, layer = dist.get_rank(), nn.Linear(2, 2)
    stage = PipelineStage(layer, rank, NUM_RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    schedule.step(
        *([torch.ones(2, 2)] if rank == 0 else []), **({"target": torch.ones(2, 2)} if rank else {})
    )
    assert layer.weight.grad is not None


def checkpoint_of_torch_distributed() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, folder = init_device_mesh("cpu", (NUM_RANKS,)), os.environ["FEATURES_STORE"] + ".dcp"
    whole = torch.arange(12.0).view(4, 3)
    dcp.save({"x": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder)
    state = {"x": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)])}
    dcp.load(state, checkpoint_id=folder)
    same(state["x"].full_tensor(), whole)


REST = [
    *(tensors_that_are_not_contiguous, tensors_without_elements, all_gather_of_different_sizes),
    *(reduce_scatter_of_different_sizes, all_to_all_of_different_sizes),
    *(output_list_of_one_tensor_is_refused, recv_from_any_source, batch_isend_irecv),
    *(coalescing_manager, object_collectives, monitored_barrier, timeout_of_a_group),
    *(another_shape_on_one_rank_is_named, split_of_a_group, ddp, ddp_at_debug_level_detail),
    *(sync_batch_norm_of_torch, sync_batch_norm_of_pycoll, fsdp2, fsdp2_over_two_axes),
    *(fsdp2_set_gradient_divide_factor, fsdp2_memory_of_the_process_group, dtensor),
    *(functional_collectives_compiled, pipeline_1f1b, checkpoint_of_torch_distributed),
]


def outcome(probe: Callable[[], None]) -> str:
    """ "works", or what the first rank with an error says."""
    with tempfile.TemporaryDirectory() as folder:

        def work(rank: int, n: int) -> None:
            os.environ.update(FEATURES_STORE=f"{folder}/again", FEATURES_RANK=str(rank))
            probe()

        results = run_group(work, NUM_RANKS, timeout_s=60, return_errors=True)
    errors = [str(result) for result in results if isinstance(result, BaseException)]
    if not errors:
        return "works"
    lines = [line for line in errors[0].splitlines() if line.strip()]
    text = re.sub(r"^\[[^]]*\] *|\[?/\S+/", "", lines[0] if lines else "an error without words")
    return re.sub(r":\d+\]|0x\w+|\d+ms", "", text)[:100]


def outcomes(probes: dict[str, Callable[[], None]]) -> dict[str, str]:
    """In the same ranks where all of them work; else each in fresh ranks."""

    def all_of_them() -> None:
        for probe in probes.values():
            probe()

    if outcome(all_of_them) == "works":
        return dict.fromkeys(probes, "works")
    return {name: outcome(probe) for name, probe in probes.items()}


def probe_all() -> dict[str, dict[str, str]]:
    for module in ("distributed.fsdp", "distributed.pipelining"):
        importlib.import_module(f"torch.{module}")  # once, not in every rank
    collectives = {
        f"{name} {cells.short(dtype)}": functools.partial(cells.check_collective, name, dtype)
        for name, dtypes in cells.COLLECTIVES.items()
        for dtype in dtypes
    }
    ops = {
        f"{collective} {op}": functools.partial(cells.op_in, collective, op)
        for collective in ("all_reduce", "reduce_scatter_tensor")
        for op in cells.OPS
    }
    rest = {probe.__name__: outcome(probe) for probe in REST}
    return {"collectives": outcomes(collectives), "ops": outcomes(ops), "rest": rest}


def main() -> None:
    if len(sys.argv) > 1:
        print("\n" + json.dumps(probe_all()))
        return
    results: dict[str, Any] = {"torch": torch.__version__}
    for backend in BACKENDS:
        environment = {**os.environ, "PYCOLL_TEST_BACKEND": backend}
        command = [sys.executable, __file__, "probe"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        results[backend] = json.loads(done.stdout.splitlines()[-1])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
