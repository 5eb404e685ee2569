"""The libraries under test, each behind the same few lines: buffers, and one call to time.

worker.py imports this inside the library's own environment, so a library is imported only when its
adapter is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from oracle import DTYPES, Message

Call = Callable[[], object]


class Unsupported(Exception):
    """The library has no such collective or dtype."""


class Mpi:
    """MPI through mpi4py, from one NumPy array into another."""

    # bf16 is no type of MPI 4. These names stand for it in MPICH and Intel MPI, which mpi4py does
    # not know, so they are looked up among the handles that both give to types of two bytes.
    BF16_NAMES = ("MPIX_BFLOAT16", "MPIX_C_BF16")
    BF16_HANDLES = range(0x4C000240, 0x4C000250)

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.version = MPI.Get_library_version().split("\n")[0].strip(" \0")
        self.versions = {"mpi4py": mpi4py.__version__, "numpy": np.__version__}

    def datatype(self, dtype: str) -> Any:
        if dtype == "f32":
            return self.mpi.FLOAT
        if self.version.startswith(("MPICH", "Intel")):
            for handle in self.BF16_HANDLES:
                found = self.mpi.Datatype.fromhandle(handle)
                if found.Get_name() in self.BF16_NAMES:
                    return found
        raise Unsupported(f"{self.version} has no bf16")

    def prepare(self, message: Message) -> tuple[Call, np.ndarray, np.ndarray]:
        bits, datatype = DTYPES[message.dtype][1], self.datatype(message.dtype)
        x, y = np.zeros(message.num_in, bits), np.zeros(message.num_out, bits)
        # Arrays of a type that mpi4py knows need no datatype, and are passed faster without.
        x_buffer, y_buffer = (x, y) if message.dtype == "f32" else ([x, datatype], [y, datatype])
        if message.collective == "broadcast":
            return partial(self.comm.Bcast, x_buffer, 0), x, x
        call = {
            "all_reduce": self.comm.Allreduce,
            "reduce_scatter": self.comm.Reduce_scatter_block,
            "all_gather": self.comm.Allgather,
            "all_to_all": self.comm.Alltoall,
        }[message.collective]
        return partial(call, x_buffer, y_buffer), x, y


class Gloo:
    """gloo through torch.distributed, on CPU tensors."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.version = f"gloo of torch {torch.__version__}"
        self.versions = {"torch": torch.__version__, "numpy": np.__version__}

    def tensor(self, count: int, dtype: str) -> tuple[Any, np.ndarray]:
        """Zeros, and their bits."""
        bits = np.zeros(count, DTYPES[dtype][1])
        tensor = self.torch.from_numpy(bits)
        return tensor if dtype == "f32" else tensor.view(self.torch.bfloat16), bits

    def prepare(self, message: Message) -> tuple[Call, np.ndarray, np.ndarray]:
        x, x_bits = self.tensor(message.num_in, message.dtype)
        if message.collective == "all_reduce":  # In place: it has no other.
            return partial(self.dist.all_reduce, x), x_bits, x_bits
        if message.collective == "broadcast":
            return partial(self.dist.broadcast, x, 0), x_bits, x_bits
        y, y_bits = self.tensor(message.num_out, message.dtype)
        call = {
            "reduce_scatter": self.dist.reduce_scatter_tensor,
            "all_gather": self.dist.all_gather_into_tensor,
            "all_to_all": self.dist.all_to_all_single,
        }[message.collective]
        return partial(call, y, x), x_bits, y_bits


class DeepSpeed(Gloo):
    """DeepSpeed's all-reduce through shared memory: its operator itself, in place.

    deepspeed.comm.inference_all_reduce() ends in this operator; called directly, it is spared that
    function's time. It is compiled when first used, into TORCH_EXTENSIONS_DIR.
    """

    def __init__(self) -> None:
        import deepspeed
        import torch
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        self.torch = torch
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        operator = ShareMemCommBuilder().load(verbose=False)
        # 2 means AVX-512, without which its bf16 kernels would not run.
        self.level = operator.vector_kernel_level()
        operator.initialize(self.size, self.rank)
        # The first one ends when all ranks have each other's memory; then its name can go.
        torch.ops.deepspeed.inference_all_reduce_(torch.zeros(1))
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{self.rank}"
        os.unlink(f"/dev/shm/{name}")
        self.version = f"DeepSpeed {deepspeed.__version__}"
        self.versions = {"torch": torch.__version__, "numpy": np.__version__}

    def prepare(self, message: Message) -> tuple[Call, np.ndarray, np.ndarray]:
        if message.collective != "all_reduce":
            raise Unsupported("DeepSpeed's shared memory has all_reduce only")
        if self.level < (2 if message.dtype == "bf16" else 1):
            raise Unsupported(f"DeepSpeed has no {message.dtype} kernels for this processor")
        x, bits = self.tensor(message.num_in, message.dtype)
        return partial(self.torch.ops.deepspeed.inference_all_reduce_.default, x), bits, bits


def numpy_dtype(dtype: str) -> Any:
    """As NumPy arrays have it; bf16 comes from ml_dtypes."""
    if dtype == "f32":
        return np.dtype(np.float32)
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported("NumPy arrays of bf16 need ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


class Pycoll:
    """pycoll through its public interface, from one NumPy array into another."""

    def __init__(self) -> None:
        import pycoll

        self.comm = pycoll.init()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.version = f"pycoll {pycoll.__version__}"
        self.versions = {"pycoll": pycoll.__version__, "numpy": np.__version__}

    def array(self, count: int, dtype: str) -> tuple[Any, np.ndarray]:
        """Zeros, and their bits."""
        bits = np.zeros(count, DTYPES[dtype][1])
        return bits.view(numpy_dtype(dtype)), bits

    def prepare(self, message: Message) -> tuple[Call, np.ndarray, np.ndarray]:
        import pycoll

        x, x_bits = self.array(message.num_in, message.dtype)
        method = getattr(self.comm, message.collective)
        if message.collective == "broadcast":
            y_bits, call = x_bits, partial(method, x, 0)
        else:
            y, y_bits = self.array(message.num_out, message.dtype)
            reduces = message.collective in ("all_reduce", "reduce_scatter")
            call = partial(method, x, "sum", y) if reduces else partial(method, x, y)
        try:
            call()
        except pycoll.UsageError as error:
            raise Unsupported(str(error)) from None
        return call, x_bits, y_bits


class PycollNew(Pycoll):
    """The same with arrays that stay as new to it as at their first call: none is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.comm.register_after = 0


ADAPTERS: dict[str, Callable[[], Any]] = {
    "mpi": Mpi,
    "gloo": Gloo,
    "deepspeed": DeepSpeed,
    "pycoll": Pycoll,
    "pycoll_new": PycollNew,
}
