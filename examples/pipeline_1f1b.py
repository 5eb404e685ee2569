"""A pipeline of one stage per rank, one forward one backward in turn, checked with one process.

torchrun --nproc-per-node 2 examples/pipeline_1f1b.py [--backend gloo]
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from one_process import Stopwatch, check, largest_difference, parser, process_group, say
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

LAYERS = 12  # splits evenly among 2, 3 and 4 stages
WIDTH, BATCH, MICROBATCHES, STEPS = 48, 32, 8, 10


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def batches() -> torch.Tensor:
    """Inputs and targets: shape [STEPS, 2, BATCH, WIDTH]."""
    return torch.randn(STEPS, 2, BATCH, WIDTH, generator=torch.Generator().manual_seed(2))


def train_stage(layers: nn.Sequential, watch: Stopwatch) -> list[float]:
    """Losses, on the last rank only."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(layers, rank, num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    means = []
    for x, y in batches():
        losses: list[torch.Tensor] = []
        with watch:
            if rank == 0:
                schedule.step(x)
            elif rank == num_stages - 1:
                schedule.step(target=y, losses=losses)
            else:
                schedule.step()
            optimizer.step()
            optimizer.zero_grad()
        means += [torch.stack(losses).mean().item()] if losses else []
    return means


def train_alone(model: nn.Sequential) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means = []
    for x, y in batches():
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(loss.item())
    return means


def main() -> None:
    args = parser(__doc__.splitlines()[0]).parse_args()
    with process_group(args.backend):
        rank, num_stages, watch = dist.get_rank(), dist.get_world_size(), Stopwatch()
        depth = LAYERS // num_stages
        layers = make_model()[rank * depth : (rank + 1) * depth]
        losses = train_stage(layers, watch)
        last = [losses]
        dist.broadcast_object_list(last, src=num_stages - 1)
        parts = [None] * num_stages if rank == 0 else None
        dist.gather_object(layers.state_dict(), parts, dst=0)
        say(
            f"pipeline_1f1b: {num_stages} stages of {depth} layers, backend {args.backend}, "
            f"{MICROBATCHES} microbatches: {watch.median_ms:.1f} ms a step"
        )
        alone = make_model()
        expected = torch.tensor(train_alone(alone)) if rank == 0 else None
        check(
            "losses",
            lambda: (torch.tensor(last[0]) - expected).abs().max().item(),
            tolerance=1e-5,
        )

        def compare_weights() -> float:
            ours = {name: tensor for part in parts for name, tensor in part.items()}
            return largest_difference(ours, alone.state_dict())

        check("weights", compare_weights, tolerance=1e-5)


if __name__ == "__main__":
    main()
