"""What ZeRO keeps, in bytes of tensors: the formulas of docs/parallel.md."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from worlds import in_one_world  # noqa: E402

from pycoll import parallel as pc  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

DEPTH, WIDTH = 40, 64
ITEM = 4  # bytes of a float32


class Peak(TorchDispatchMode):
    """The most bytes that the storages of all living tensors had at the end of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref] = {}
        self.nbytes = 0

    def note(self, *tensors) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = weakref.ref(storage)

    def measure(self) -> int:
        self._alive = {key: ref for key, ref in self._alive.items() if ref() is not None}
        return sum(ref().nbytes() for ref in self._alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, result)):
            if isinstance(x, torch.Tensor):
                self.note(x)
        self.nbytes = max(self.nbytes, self.measure())
        return result


def peak(comm, zero: int) -> tuple[int, int]:
    """Peak of one step with Adam after a first one; and the number of parameters."""
    mesh = pc.mesh(comm=comm)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    count = sum(p.numel() for p in model.parameters())
    model = pc.parallelize(model, mesh, zero=zero, bucket_mb=WIDTH * WIDTH * ITEM / 2**20)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), foreach=False))
    x = torch.randn(1, WIDTH)

    def step() -> None:
        model.step(x, x, loss=nn.functional.mse_loss)
        optimizer.step()

    step()
    gc.collect()
    with Peak() as found:
        step()
    return found.nbytes, count


def test_peak_is_within_5_percent_of_the_formula():
    """float32, Adam: parameters, gradients and two moments, 4 bytes of each, psi elements."""
    formulas = {
        0: lambda psi, n: 16 * psi,
        1: lambda psi, n: 8 * psi + 8 * psi / n,
        2: lambda psi, n: 4 * psi + 12 * psi / n,
        3: lambda psi, n: 16 * psi / n,
    }
    cases = [(2, 0), (4, 1), (2, 2), (2, 3)]
    for (n, zero), found in zip(cases, in_one_world(peak, cases), strict=True):
        for nbytes, count in found:
            share = nbytes / formulas[zero](count, n)
            assert 0.95 <= share <= 1.05, f"ZeRO {zero}, {n} replicas: {share:.3f} of the formula"
