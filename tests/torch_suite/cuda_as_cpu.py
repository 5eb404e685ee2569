"""Lets torch's tests that ask for GPUs run on the CPU: what they test is rarely the device.

Tests of torch's SyncBatchNorm, which refuses the CPU, get pycoll's where the backend is pycoll.

Most tests of DistributedDataParallel say `.cuda(rank)` and `device_ids=[rank]`, and are skipped
where there is no GPU. Here every such device is the CPU, so that the backend is driven by them too.
A test that truly needs a GPU (a stream, its memory, its profiler) fails so with Gloo as well, and
is not in the list that our backend must pass.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode


def let_tests_without_a_gpu_in(common_distributed: ModuleType) -> None:
    """Before the tests are imported: the decorators that count GPUs let everything pass."""
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.skip_if_lt_x_gpu = lambda x, **_: lambda test: test
    common_distributed.nccl_skip_if_lt_x_gpu = lambda backend, x: lambda test: test
    common_distributed.require_n_gpus_for_nccl_backend = lambda n, backend: lambda test: test
    common_distributed.init_multigpu_helper = lambda n, backend: {i: [i] for i in range(n)}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return type(device) is int  # a rank, where a device is meant


class CudaAsCpu(TorchFunctionMode):
    """Within it every CUDA device that a test names is the CPU."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.patches = ExitStack()

    def __enter__(self) -> CudaAsCpu:
        make_ddp, move = DistributedDataParallel.__init__, torch.nn.Module.to

        def ddp_without_devices(self: Any, *args: Any, **kwargs: Any) -> None:
            make_ddp(self, *args, **{**kwargs, "device_ids": None, "output_device": None})

        def move_to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
            return move(self, *("cpu" if _is_cuda(arg) else arg for arg in args), **kwargs)

        functions = {
            "set_device": lambda *_, **__: None,
            "synchronize": lambda *_, **__: None,
            "manual_seed": torch.manual_seed,
            "current_device": lambda: "cuda",
        }
        replaced = [(torch.cuda, *item) for item in functions.items()]
        replaced.append((torch.accelerator, "current_device_index", lambda: "cpu"))
        replaced.append((DistributedDataParallel, "__init__", ddp_without_devices))
        replaced.append((torch.nn.Module, "to", move_to_cpu))
        if self.backend == "pycoll":
            from pycoll.torch.sync_batch_norm import SyncBatchNorm

            # torch's refuses the CPU, so that Gloo fails these tests.
            replaced.append((torch.nn, "SyncBatchNorm", SyncBatchNorm))
        for where, name, function in replaced:
            self.patches.enter_context(mock.patch.object(where, name, function))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.close()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *("cpu" if _is_cuda(arg) else arg for arg in args[1:]))
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)
