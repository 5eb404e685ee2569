"""What benchmarks/trainers.py compares: one GPT, trained by torch's means and by pycoll.

A variant is made on each rank of a world and returns its step: a function that trains one batch and
returns a loss, whose mean over the ranks is that of the batch. All variants have the same initial
weights, batches and optimizer (AdamW).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn import functional

import pycoll
from pycoll import parallel as pc

LR = 1e-4
TP_PLAN = {"*.q|*.k|*.v|*.up": "col", "*.out|*.down": "row", "token|head": "vocab"}


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the model, and of a batch of one replica."""

    dim: int = 384
    blocks: int = 6
    vocab: int = 8192
    samples: int = 4
    context: int = 128
    heads: int = 6


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        dim, self.head_dim = size.dim, size.dim // size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed = self.norm_1(x_BTD)
        heads = [
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(functional.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocab, size.dim)
        self.place = nn.Embedding(size.context, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token(tokens_BT) + self.place(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Stage(nn.Module):
    """Half of a GPT, as torch.distributed.pipelining takes stages."""

    def __init__(self, model: GPT, stage: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.first = stage == 0
        self.blocks = model.blocks[:half] if self.first else model.blocks[half:]
        if self.first:
            self.token, self.place = model.token, model.place
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.token(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.first else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(slots=True)
class Rank:
    """One rank of the measured world.

    Attributes:
        groups: torch's process groups of all ranks, by the name of the backend.
    """

    comm: pycoll.Communicator
    groups: dict[str, Any]
    size: Size

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.size)

    def batch(self, replica: int) -> tuple[Tensor, Tensor]:
        """The batch of a replica, the same at every step."""
        shape = (self.size.samples, self.size.context + 1)
        random = torch.Generator().manual_seed(replica)
        tokens = torch.randint(self.size.vocab, shape, generator=random)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Step = Callable[[], float]
Make = Callable[[Rank], Step]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def alone(rank: Rank) -> Step:
    """Every rank trains by itself: the time without communication."""
    model = rank.model()
    return _loop(rank.batch(rank.comm.rank), model, adamw(model))


def _loop(
    batch: tuple[Tensor, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    within: Callable[[], Any] = contextlib.nullcontext,
) -> Step:
    """The loop of PyTorch."""
    x, y = batch

    def step() -> float:
        with within():
            loss = loss_of(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def ddp(backend: str) -> Make:
    def make(rank: Rank) -> Step:
        model = _ddp(rank, backend)
        return _loop(rank.batch(rank.comm.rank), model, adamw(model))

    return make


def ddp_zero(backend: str) -> Make:
    """DDP with torch's optimizer of ZeRO 1."""

    def make(rank: Rank) -> Step:
        model = _ddp(rank, backend)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=rank.groups[backend], lr=LR
        )
        return _loop(rank.batch(rank.comm.rank), model, optimizer)

    return make


def _ddp(rank: Rank, backend: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        rank.model(), process_group=rank.groups[backend], gradient_as_bucket_view=True
    )


def fsdp(backend: str, *, reshard: bool) -> Make:
    """FSDP2: ZeRO 3, or ZeRO 2 if parameters stay gathered after the forward."""

    def make(rank: Rank) -> Step:
        model, mesh = rank.model(), DeviceMesh.from_group(rank.groups[backend], "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return _loop(rank.batch(rank.comm.rank), model, adamw(model))

    return make


def dtensor(backend: str) -> Make:
    """Tensor parallelism of torch, with the loss on shards of the logits."""

    def make(rank: Rank) -> Step:
        model, mesh = rank.model(), DeviceMesh.from_group(rank.groups[backend], "cpu")
        column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
        plan = {name: column() for name in ("q", "k", "v", "up")}
        for block in model.blocks:
            parallel.parallelize_module(block, mesh, {**plan, "out": row(), "down": row()})
        ends = {
            "token": row(input_layouts=Replicate()),
            "head": column(output_layouts=Shard(-1), use_local_output=False),
        }
        parallel.parallelize_module(model, mesh, ends)
        return _loop(rank.batch(0), model, adamw(model), parallel.loss_parallel)

    return make


def pipelining(backend: str) -> Make:
    """1F1B of torch.distributed.pipelining, with microbatches of one sample."""

    def make(rank: Rank) -> Step:
        stage_idx, group = rank.comm.rank, rank.groups[backend]
        model = Stage(rank.model(), stage_idx)
        device = torch.device("cpu")
        stage = PipelineStage(model, stage_idx, rank.comm.size, device, group=group)
        schedule = Schedule1F1B(stage, rank.size.samples, loss_fn=loss_of)
        optimizer, (x, y) = adamw(model), rank.batch(0)

        def step() -> float:
            losses: list[Tensor] = []
            if model.first:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            return float(torch.stack(losses).mean().detach()) * rank.comm.size if losses else 0.0

        return step

    return make


def ours(microbatches: int = 1, *, zero: int = 0, **sizes: int) -> Make:
    """pycoll's trainer on a mesh of these sizes."""

    def make(rank: Rank) -> Step:
        mesh = pc.mesh(**sizes, comm=rank.comm)
        tp = TP_PLAN if mesh.size("tp") > 1 else None
        model = pc.parallelize(rank.model(), mesh, tp=tp, pp="blocks", zero=zero)
        optimizer = pc.optimizer(adamw(model))
        x, y = rank.batch(mesh.rank("dp"))

        def step() -> float:
            out = model.step(x, y, loss=pc.cross_entropy, microbatches=microbatches)
            optimizer.step()
            return out.loss

        return step

    return make


def variants(size: Size) -> dict[str, dict[str, Make]]:
    """The variants, by mode and by the name of the library."""
    both = ("gloo", "pycoll")
    return {
        "none": {"torch": alone},
        "dp": {**{f"DDP, {of}": ddp(of) for of in both}, "pc": ours()},
        "zero 1": {**{f"DDP + ZeRO, {of}": ddp_zero(of) for of in both}, "pc": ours(zero=1)},
        "zero 2": {
            **{f"FSDP2, {of}": fsdp(of, reshard=False) for of in both},
            "pc": ours(zero=2),
        },
        "zero 3": {
            **{f"FSDP2, {of}": fsdp(of, reshard=True) for of in both},
            "pc": ours(zero=3),
        },
        "tp": {**{f"DTensor, {of}": dtensor(of) for of in both}, "pc": ours(tp=2)},
        "pp": {
            **{f"pipelining, {of}": pipelining(of) for of in both},
            "pc": ours(size.samples, pp=2),
        },
        # torch's own context parallelism has no attention for CPUs (torch 2.13).
        "cp": {"pc": ours(cp=2)},
    }


__all__ = ["Make", "Rank", "Size", "Step", "variants"]
