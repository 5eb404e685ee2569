"""The libraries under test behind one interface: buffers, a call to time, a barrier.

A library is imported only when its adapter is made: benchmarks/worker.py does so in the library's
own environment, in which there is no pycoll.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pycoll.bench.arithmetic import SMALL, STORAGE, narrow
from pycoll.bench.case import Case

Call = Callable[[], object]
Buffer = tuple[Any, np.ndarray]  # an argument of the library, and its elements as they are stored


class Unsupported(Exception):
    """The library has no such collective, op or dtype."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to run; given and got are its input and its output, flat, as stored."""

    call: Call
    given: np.ndarray
    got: np.ndarray

    def timed(self, case: Case) -> Call:
        """What is timed: the call, after writing ones to its input if the case asks for that.

        Without that, an input has what `run` wrote, or if it is the output, too, what sums have
        made of it: in the end infinity. Zeros would not do: some CPUs write them faster.
        """
        if not case.rewritten:
            return self.call
        call, given, one = self.call, self.given, narrow(np.ones(1), case.dtype)[0]

        def rewrite_and_call() -> None:
            given.fill(one)
            call()

        return rewrite_and_call

    def run(self, case: Case, rank: int) -> None:
        """One call on the inputs that the case defines."""
        self.given[:] = case.inputs(rank)
        self.call()


class Mpi:
    """MPI through mpi4py, from one NumPy array into another."""

    # bf16 is no type of MPI 4. These names stand for it in MPICH and Intel MPI, which mpi4py does
    # not know, so they are looked up among the handles that both give to types of two bytes.
    BF16_NAMES = ("MPIX_BFLOAT16", "MPIX_C_BF16")
    BF16_HANDLES = range(0x4C000240, 0x4C000250)
    METHODS = {
        "all_reduce": "Allreduce",
        "reduce_scatter": "Reduce_scatter_block",
        "all_gather": "Allgather",
        "all_to_all": "Alltoall",
        "reduce": "Reduce",
        "gather": "Gather",
        "scatter": "Scatter",
    }

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.barrier = self.comm.Barrier
        self.version = MPI.Get_library_version().split("\n")[0].strip(" \0")
        self.versions = {"mpi4py": mpi4py.__version__, "numpy": np.__version__}

    def datatype(self, dtype: str) -> Any:
        if dtype == "bf16" and self.version.startswith(("MPICH", "Intel")):
            for handle in self.BF16_HANDLES:
                found = self.mpi.Datatype.fromhandle(handle)
                if found.Get_name() in self.BF16_NAMES:
                    return found
        raise Unsupported(f"{self.version} has no {dtype}")

    def prepare(self, case: Case) -> Prepared:
        sums_or_moves(case)
        x, y = (np.zeros(count, STORAGE[case.dtype]) for count in (case.num_in, case.num_out))
        x_buffer: Any = x
        y_buffer: Any = y
        # Arrays of a type that mpi4py knows need no datatype, and are passed faster without.
        if case.dtype != "f32":
            datatype = self.datatype(case.dtype)
            x_buffer, y_buffer = [x, datatype], [y, datatype]
        if case.collective == "broadcast":
            return Prepared(partial(self.comm.Bcast, x_buffer, 0), x, x)
        method = getattr(self.comm, method_of(self.METHODS, case))
        if self.rank != 0:  # rank 0 is the root
            x_buffer = None if case.collective == "scatter" else x_buffer
            y_buffer = None if case.collective in ("reduce", "gather") else y_buffer
        return Prepared(partial(method, x_buffer, y_buffer), x, y)


class Gloo:
    """gloo through torch.distributed, on CPU tensors."""

    DTYPES = ("f32", "f64", "f16", "bf16", "i8", "i32", "i64", "u8")
    METHODS = {
        "reduce_scatter": "reduce_scatter_tensor",
        "all_gather": "all_gather_into_tensor",
        "all_to_all": "all_to_all_single",
        "gather": "gather",
        "scatter": "scatter",
    }

    def __init__(self, **options: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", **options)
        self.torch, self.dist = torch, dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier: Call = dist.barrier
        self.version = f"gloo of torch {torch.__version__}"
        self.versions = {"torch": torch.__version__, "numpy": np.__version__}

    def tensor(self, count: int, dtype: str) -> Buffer:
        bits = np.zeros(count, STORAGE[dtype])
        tensor = self.torch.from_numpy(bits)
        return (tensor.view(self.torch.bfloat16) if dtype == "bf16" else tensor), bits

    def prepare(self, case: Case) -> Prepared:
        sums_or_moves(case)
        if case.dtype not in self.DTYPES:
            raise Unsupported(f"gloo has no {case.dtype}")
        x, x_bits = self.tensor(case.num_in, case.dtype)
        if case.collective == "all_reduce":  # in place: it has no other form
            return Prepared(partial(self.dist.all_reduce, x), x_bits, x_bits)
        if case.collective in ("broadcast", "reduce"):
            method = getattr(self.dist, case.collective)
            return Prepared(partial(method, x, 0), x_bits, x_bits)
        y, y_bits = self.tensor(case.num_out, case.dtype)
        method = getattr(self.dist, method_of(self.METHODS, case))
        if case.collective not in ("gather", "scatter"):
            return Prepared(partial(method, y, x), x_bits, y_bits)
        whole, mine = (y, x) if case.collective == "gather" else (x, y)
        blocks = list(whole.chunk(self.size)) if self.rank == 0 else None
        return Prepared(partial(method, mine, blocks), x_bits, y_bits)


class DeepSpeed(Gloo):
    """DeepSpeed's all-reduce through shared memory: its operator itself, in place.

    deepspeed.comm.inference_all_reduce() ends in this operator; called directly, it is spared that
    function's time. It is compiled when first used, into TORCH_EXTENSIONS_DIR.
    """

    def __init__(self) -> None:
        if int(os.environ["WORLD_SIZE"]) > len(os.sched_getaffinity(0)):
            raise Unsupported("DeepSpeed spins while it waits: 300 ms a call if ranks share cores")
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
        self.barrier = partial(torch.ops.deepspeed.inference_all_reduce_.default, torch.zeros(1))
        self.barrier()
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{self.rank}"
        os.unlink(f"/dev/shm/{name}")
        self.version = f"DeepSpeed {deepspeed.__version__}"
        self.versions = {"torch": torch.__version__, "numpy": np.__version__}

    def prepare(self, case: Case) -> Prepared:
        sums_or_moves(case)
        if case.collective != "all_reduce":
            raise Unsupported("DeepSpeed's shared memory has all_reduce only")
        levels = {"f32": 1, "bf16": 2}
        if self.level < levels.get(case.dtype, 3):
            raise Unsupported(f"DeepSpeed has no {case.dtype} kernels for this processor")
        x, bits = self.tensor(case.num_in, case.dtype)
        call = partial(self.torch.ops.deepspeed.inference_all_reduce_.default, x)
        return Prepared(call, bits, bits)


def numpy_dtype(dtype: str) -> np.dtype:
    """The dtype of a NumPy array.

    Raises:
        UsageError: It needs ml_dtypes, which is not installed.
    """
    if dtype in SMALL:
        from pycoll.arrays.memory import numpy_dtype as with_ml_dtypes

        return with_ml_dtypes(dtype)
    return np.dtype(bool if dtype == "bool" else STORAGE[dtype])


class Pycoll:
    """pycoll through its public interface, from one NumPy array into another.

    Args:
        comm: The communicator; None: the one of `pycoll.init`.
        mapped: Whether the arrays are those of `Communicator.empty`.
    """

    def __init__(self, comm: Any = None, mapped: bool = False) -> None:
        import pycoll

        self.comm = comm or pycoll.init()
        self.mapped = mapped
        self.rank, self.size = self.comm.rank, self.comm.size
        self.barrier: Call = self.comm.barrier
        self.version = f"pycoll {pycoll.__version__}"
        self.versions = {"pycoll": pycoll.__version__, "numpy": np.__version__}

    def array(self, blocks: int, case: Case) -> Buffer:
        """Zeros, of the shape (blocks, elements of a block)."""
        from pycoll.errors import UsageError

        try:
            dtype = numpy_dtype(case.dtype)
        except UsageError as error:
            raise Unsupported(str(error)) from None
        make = self.comm.empty if self.mapped else np.zeros
        array = make((blocks, case.block), dtype)
        bits = array.view(STORAGE[case.dtype]).reshape(-1)
        bits[:] = 0
        return array, bits

    def prepare(self, case: Case) -> Prepared:
        name, row, n = case.collective, case.row, self.size
        more = {} if case.algorithm == "auto" else {"algorithm": case.algorithm}
        method = partial(getattr(self.comm, name), **more)
        if name == "barrier":
            return Prepared(method, np.zeros(0), np.zeros(0))
        x, x_bits = self.array(row.in_blocks(n), case)
        if name == "broadcast":
            return Prepared(partial(method, x, 0), x_bits, x_bits)
        out, out_bits = self.array(row.out_blocks(n), case)
        y = out if self.rank == 0 or name not in ("gather", "reduce") else None
        arguments = [0] * row.has_root + [case.op] * row.has_op
        return Prepared(partial(method, x, *arguments, y), x_bits, out_bits)


class PycollRegistered(Pycoll):
    """pycoll with the arrays of `Communicator.empty`."""

    def __init__(self) -> None:
        super().__init__(mapped=True)


class PycollNew(Pycoll):
    """pycoll without automatic registration: its arrays are as new ones at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.comm.register_after = 0


def sums_or_moves(case: Case) -> None:
    """The only ops that the other libraries are asked for."""
    if case.op not in ("sum", "none"):
        raise Unsupported(f"{case.op} is not measured here")


def method_of(methods: dict[str, str], case: Case) -> str:
    if case.collective not in methods:
        raise Unsupported(f"{case.collective} is not measured here")
    return methods[case.collective]


ADAPTERS: dict[str, Callable[[], Any]] = {
    "mpi": Mpi,
    "gloo": Gloo,
    "deepspeed": DeepSpeed,
    "pycoll": Pycoll,
    "pycoll_registered": PycollRegistered,
    "pycoll_new": PycollNew,
}
