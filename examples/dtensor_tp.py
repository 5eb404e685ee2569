"""Tensor parallelism with DTensor: a transformer block split over ranks, checked with one process.

torchrun --nproc-per-node 2 examples/dtensor_tp.py [--backend gloo]

Between the split layers the sequence is sharded too (sequence parallelism): a layer begins with an
all_gather and ends with a reduce_scatter.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from one_process import Stopwatch, check, largest_difference, parser, process_group, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

HEADS, HEAD_WIDTH = 12, 8  # splits evenly among 2, 3 and 4
WIDTH, LENGTH, BATCH, LAYERS, STEPS = HEADS * HEAD_WIDTH, 24, 4, 2, 10


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        # A rank has its own heads only: their number follows from the width of its shard.
        q, k, v = (
            layer(x_BTD).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x_BTD)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD))
        return x_BTD + self.mlp(self.norm_2(x_BTD))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def split(model: nn.Module) -> nn.Module:
    """Shards columns, then rows: one exchange at each end of attention and of the MLP."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "norm_1": SequenceParallel(),
        "attention": PrepareModuleInput(**whole),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm_2": SequenceParallel(),
        "mlp": PrepareModuleInput(**whole),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def train(model: nn.Module, rank: int, num_ranks: int, watch: Stopwatch) -> list[torch.Tensor]:
    """Trains on this rank's part of the sequence; returns its part of every step's output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(3)
    outputs = []
    for _ in range(STEPS):
        x_BTD, y_BTD = torch.randn(2, BATCH, LENGTH, WIDTH, generator=random)
        with watch:
            output = model(x_BTD.chunk(num_ranks, dim=1)[rank])
            # The mean over the whole sequence is the sum of the parts' shares.
            loss = (output - y_BTD.chunk(num_ranks, dim=1)[rank]).square().sum() / y_BTD.numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        outputs.append(output.detach())
    return outputs


def main() -> None:
    args = parser(__doc__.splitlines()[0]).parse_args()
    with process_group(args.backend):
        rank, num_ranks, watch = dist.get_rank(), dist.get_world_size(), Stopwatch()
        model = split(make_model())
        mine = torch.stack(train(model, rank, num_ranks, watch))
        parts = [torch.empty_like(mine) for _ in range(num_ranks)]
        dist.all_gather(parts, mine)
        outputs = torch.cat(parts, dim=2)
        state = model.state_dict()
        weights = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
        say(
            f"dtensor_tp: {num_ranks} ranks, backend {args.backend}: {LAYERS} blocks of "
            f"{HEADS // num_ranks} heads a rank, {watch.median_ms:.1f} ms a step"
        )
        alone = make_model()
        expected = torch.stack(train(alone, 0, 1, Stopwatch())) if rank == 0 else None
        check("outputs", lambda: (outputs - expected).abs().max().item(), tolerance=1e-4)
        check("weights", lambda: largest_difference(weights, alone.state_dict()), tolerance=1e-4)


if __name__ == "__main__":
    main()
