"""FSDP2 trains a small GPT on the text of this file: losses and weights of one process.

torchrun --nproc-per-node 2 examples/fsdp2_gpt.py [--backend gloo] [--divide-factor 3]

Parameters, gradients and the optimiser's state are sharded: a rank keeps its share and gathers a
block while it computes. `--divide-factor` divides gradients by that instead of the number of ranks,
within the reduce_scatter (ReduceOp.PREMUL_SUM, which Gloo does not have); the learning rate of one
process is set to match.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from one_process import Stopwatch, check, largest_difference, parser, process_group, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BATCH = 12  # of all ranks together: splits evenly among 2, 3 and 4
CONTEXT, WIDTH, HEADS, LAYERS, STEPS = 48, 64, 4, 3, 25


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_BTD)).chunk(3, dim=-1)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(self.norm_2(x_BTD))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.token(tokens_BT) + self.place.weight
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def batches() -> torch.Tensor:
    """Characters of this file: shape [STEPS, BATCH, CONTEXT + 1]."""
    text = torch.tensor([min(ord(c), 127) for c in Path(__file__).read_text()])
    places = torch.randint(
        len(text) - CONTEXT, (STEPS, BATCH, 1), generator=torch.Generator().manual_seed(1)
    )
    return text[places + torch.arange(CONTEXT + 1)]


def train(
    model: nn.Module, rank: int, num_ranks: int, gradient_scale: float, watch: Stopwatch
) -> list[float]:
    """Losses of this rank's share; gradient_scale undoes a divide factor (SGD is linear in it)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 * gradient_scale)
    share = BATCH // num_ranks
    losses = []
    for batch in batches():
        mine = batch[rank * share : (rank + 1) * share]
        with watch:
            logits = model(mine[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers every parameter: all ranks must call it."""
    state = model.state_dict()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--divide-factor", type=float, help="needs ReduceOp.PREMUL_SUM")
    args = options.parse_args()
    with process_group(args.backend):
        rank, num_ranks, watch = dist.get_rank(), dist.get_world_size(), Stopwatch()
        mesh = init_device_mesh("cpu", (num_ranks,))
        model = Gpt()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        factor = args.divide_factor or num_ranks
        if args.divide_factor:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(args.divide_factor)
        mine = torch.tensor(train(model, rank, num_ranks, factor / num_ranks, watch))
        dist.all_reduce(mine)
        losses, weights = mine / num_ranks, full(model)
        say(
            f"fsdp2_gpt: {num_ranks} ranks, backend {args.backend}, gradients divided by "
            f"{factor:g}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {watch.median_ms:.1f} ms a step"
        )
        alone = Gpt()
        expected = torch.tensor(train(alone, 0, 1, 1.0, Stopwatch())) if rank == 0 else None
        check("losses", lambda: (losses - expected).abs().max().item(), tolerance=1e-3)
        check("weights", lambda: largest_difference(weights, alone.state_dict()), tolerance=1e-3)


if __name__ == "__main__":
    main()
