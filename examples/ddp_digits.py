"""Trains on digits with DistributedDataParallel: the weights are those of one process.

torchrun --nproc-per-node 2 examples/ddp_digits.py [--backend gloo] [--hook bf16|int8]
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from one_process import Stopwatch, check, largest_difference, parser, process_group, say
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycoll.torch.hooks import Int8State, bf16_compress, int8_compress
from pycoll.torch.sync_batch_norm import SyncBatchNorm

BATCH = 240  # of all ranks together: splits evenly among 2, 3, 4 and 5
EPOCHS = 6
TRAINED = 1440


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def train(model: nn.Module, rank: int, num_ranks: int, watch: Stopwatch) -> None:
    """Trains on this rank's share of every batch; a single process is rank 0 of 1."""
    images, labels = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    share = BATCH // num_ranks
    for epoch in range(EPOCHS):
        order = torch.randperm(TRAINED, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            mine = batch[rank * share : (rank + 1) * share]
            with watch:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
                optimizer.step()


def accuracy(model: nn.Module) -> float:
    images, labels = digits()
    model.eval()
    with torch.no_grad():
        guesses = model(images[TRAINED:]).argmax(1)
    return (guesses == labels[TRAINED:]).float().mean().item()


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--hook", choices=["none", "bf16", "int8"], default="none")
    args = options.parse_args()
    with process_group(args.backend):
        rank, num_ranks, watch = dist.get_rank(), dist.get_world_size(), Stopwatch()
        model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(make_model()))
        if args.hook == "bf16":
            model.register_comm_hook(None, bf16_compress)
        elif args.hook == "int8":
            model.register_comm_hook(Int8State(), int8_compress)
        train(model, rank, num_ranks, watch)
        say(
            f"ddp_digits: {num_ranks} ranks, backend {args.backend}, hook {args.hook}: "
            f"{accuracy(model.module):.1%} of unseen digits read, {watch.median_ms:.2f} ms a step"
        )

        def compare_weights() -> float:
            alone = make_model()
            train(alone, 0, 1, Stopwatch())
            return largest_difference(model.module.state_dict(), alone.state_dict())

        def compare_accuracy() -> float:
            alone = make_model()
            train(alone, 0, 1, Stopwatch())
            return abs(accuracy(model.module) - accuracy(alone))

        if args.hook == "none":
            check("weights and statistics", compare_weights, tolerance=1e-3)
        check("share of digits read", compare_accuracy, tolerance=0.02)


if __name__ == "__main__":
    main()
