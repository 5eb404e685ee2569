"""Measured modes of parallelism side by side: a device's input, traffic, memory and work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from pycoll.communicator import Communicator
from pycoll.errors import UsageError
from pycoll.launch import run_ranks
from pycoll.parallel.build import parallelize
from pycoll.parallel.core.batches import shard
from pycoll.parallel.core.mesh import mesh as make_mesh
from pycoll.parallel.features.annotate.annotations import annotate

BATCH, WIDTH, DEPTH, ITEM = 8, 32, 5, 4
_PLAN: dict[str, Any] = {"tp": {"*.up": "col", "*.down": "row"}}
_ANNOTATED = {"annotate": annotate({"*.up": (None, "tp")}, torch.zeros(BATCH, WIDTH))}
# The axis of each mode, and the options of `parallelize`.
_MODES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "one process": (None, {}),
    "data parallel": ("dp", {}),
    "tensor parallel": ("tp", _PLAN),
    "pipeline parallel": ("pp", {"pp": "blocks"}),
    "tensor parallel by an annotation": ("tp", _ANNOTATED),
}


@dataclass(frozen=True, slots=True)
class Mode:
    """Measurements of one step of a mode.

    Attributes:
        name: Name of the mode.
        input_share: Largest share of the batch that a device gets.
        moved: Bytes that all devices sent, in units of the model's size.
        activations_moved: The same bytes, in units of the activations between two blocks.
        stored: Bytes of parameters on all devices, in units of the model's size.
        balance: Largest over mean number of multiplications in products per device; 1 is even.
        limit: Error text for more devices than the mode can use.
    """

    name: str
    input_share: float
    moved: float
    activations_moved: float
    stored: float
    balance: float
    limit: str


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def measure(num_ranks: int) -> list[Mode]:
    """Runs one step of a small model in each mode.

    Args:
        num_ranks: Number of ranks of the parallel modes.

    Returns:
        The modes, one process first.

    Raises:
        UsageError: `num_ranks` is below 2, or above the limit of a mode.
    """
    if not 2 <= num_ranks <= DEPTH:
        raise UsageError(f"modes: expected 2 to {DEPTH} ranks, got {num_ranks}")
    # Tracing imports much of torch: once, before the ranks are forked.
    _ANNOTATED["annotate"].plan(_Model(), 1)
    return [_mode(name, num_ranks) for name in _MODES]


def _mode(name: str, num_ranks: int) -> Mode:
    axis, _ = _MODES[name]
    found = run_ranks(_step, num_ranks if axis else 1, name)
    model = sum(p.numel() for p in _Model().parameters()) * ITEM
    sent = sum(rank["sent"] for rank in found)
    work = [rank["multiplications"] for rank in found]
    return Mode(
        name,
        max(rank["samples"] for rank in found) / BATCH,
        sent / model,
        sent / (BATCH * WIDTH * ITEM),
        sum(rank["stored"] for rank in found) / model,
        max(work) / (sum(work) / len(work)),
        "" if axis is None else _limit(name),
    )


def _step(comm: Communicator, name: str) -> dict[str, int]:
    axis, options = _MODES[name]
    torch.set_num_threads(1)
    mesh = make_mesh(**({"dp": 1, axis: comm.size} if axis else {}), comm=comm)
    model = parallelize(_Model(), mesh, **options)
    x = torch.ones(BATCH, WIDTH)
    ((x, y),) = shard([(x, x)], mesh)
    before = {name: mesh.comm(name).ledger["sent_bytes"] for name in mesh.sizes}
    with FlopCounterMode(display=False) as counter:
        model.step(x, y, loss=functional.mse_loss, microbatches=1)
    collectives = sum(mesh.comm(name).ledger["sent_bytes"] - before[name] for name in before)
    return {
        # The core's ledger of collectives does not count messages of the pipeline.
        "sent": collectives + mesh.ledger.of("pp", "send").nbytes,
        "samples": len(x),
        "stored": sum(p.numel() * p.element_size() for p in model.parameters()),
        "multiplications": counter.get_total_flops() // 2,
    }


def _limit(name: str) -> str:
    """Error text for a size larger than the mode supports."""
    axis, options = _MODES[name]
    assert axis is not None

    def ask(comm: Communicator) -> str:
        mesh = make_mesh(**{"dp": 1, axis: comm.size}, comm=comm)
        try:
            if axis == "dp":
                list(shard([(torch.ones(1, 1), torch.ones(1))], mesh))
            parallelize(_Model(), mesh, **options)
        except UsageError as error:
            return str(error)
        return f"{4 * WIDTH} columns"

    return str(run_ranks(ask, 2 if axis == "dp" else DEPTH + 1)[0])


__all__ = ["Mode", "measure"]
