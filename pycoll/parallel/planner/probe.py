"""Measured steps: predicted layouts, run on ranks of this host."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.communicator import Communicator
from pycoll.launch import run_ranks
from pycoll.parallel.build import parallelize
from pycoll.parallel.core.batches import num_samples, shard
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.mesh import mesh as make_mesh
from pycoll.parallel.core.specs import replace, tensors_in
from pycoll.parallel.planner.script import REQUEST
from pycoll.parallel.planner.step import Prediction
from pycoll.parallel.trainer.optimizers import optimizer

_WARM_UP = 2  # steps that allocate memory

Around = Callable[[Mesh], AbstractContextManager[Any]]


def options_of(of: Prediction) -> dict[str, Any]:
    """The arguments of `parallelize` that a layout decides."""
    return {
        "schedule": of.layout.schedule,
        "zero": of.layout.zero,
        "recompute": of.layout.recompute,
        "sequence_parallel": of.layout.sequence_parallel,
        "costs": of.stages,
    }


def step_times(
    model: nn.Module,
    x: Any,
    of: Prediction,
    *,
    y: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    moments: int = 2,
    steps: int = 3,
    arguments: dict[str, Any] | None = None,
    around: Around = lambda mesh: nullcontext(),
) -> list[float]:
    """Runs a layout on ranks of this host, each with one thread, and times its steps.

    Args:
        model: The model before `parallelize`. On the device "meta" it gets random weights, and
            buffers of zeros.
        x: The batch of a step of all replicas; without values it is zeros.
        of: The layout, and the costs of its stages.
        y: Targets of `x`, for `loss`.
        loss: As in `step`; None: the mean of the outputs.
        moments: 2 is AdamW, 1 SGD with momentum, 0 SGD.
        steps: Timed steps, after two others.
        arguments: Further arguments of `parallelize`: tp, pp, precision.
        around: Makes, for the mesh of a rank, the context of its steps, such as `Paced`.

    Returns:
        Seconds of each timed step, with that of the optimizer, on the slowest rank.

    Raises:
        Error: A rank failed.

    Cost: `steps + 2` steps, the start of `of.layout.world` processes, and a model on each.
    """
    target = torch.zeros(num_samples(x)) if y is None else y
    batch = _with_values(x), _with_values(target)

    def rank(comm: Communicator) -> list[float]:
        for name in (REQUEST, "PYCOLL_MESH"):
            os.environ.pop(name, None)  # those of the script that is planned
        sizes: dict[str, Any] = of.layout.sizes
        mesh = make_mesh(comm=comm, **sizes)
        context = around(mesh)
        trained = parallelize(_filled(model), mesh, **(arguments or {}), **options_of(of))
        stepper = optimizer(_torch_optimizer(trained, moments))
        ((mine, targets),) = shard([batch], mesh)
        times = []
        for _ in range(_WARM_UP + steps):
            mesh.world.barrier()
            start_s = time.perf_counter()
            with context:
                trained.step(mine, targets, loss=loss or _mean, microbatches=of.layout.microbatches)
                stepper.step()
            times.append(time.perf_counter() - start_s)
        return times[_WARM_UP:]

    found = run_ranks(rank, of.layout.world)
    return [max(times) for times in zip(*found, strict=True)]


def measured_s(model: nn.Module, x: Any, of: Prediction, **options: Any) -> float:
    """The median of `step_times`, whose arguments it takes."""
    return statistics.median(step_times(model, x, of, **options))


def _with_values(batch: Any) -> Any:
    def value(tensor: Tensor) -> Tensor:
        is_known = tensor.device.type == "cpu"
        return tensor if is_known else torch.zeros(tensor.shape, dtype=tensor.dtype)

    return replace(batch, Tensor, value)


def _filled(model: nn.Module) -> nn.Module:
    """The model, on the CPU."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model
    model = model.to_empty(device="cpu")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for parameter in model.parameters():
            parameter.normal_(std=0.02, generator=random)
    return model


def _torch_optimizer(model: nn.Module, moments: int) -> torch.optim.Optimizer:
    if moments == 2:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if moments else 0.0)


def _mean(output: Any, _: Any) -> Tensor:
    return torch.stack([of.float().mean() for of in tensors_in(output)]).sum()


__all__ = ["measured_s", "options_of", "step_times"]
