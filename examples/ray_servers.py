"""A parameter server on Ray: the task of Ray's own example, on digits, in any mode.

python examples/ray_servers.py                     # two workers, synchronous
python examples/ray_servers.py --mode async --servers 2 --workers 4

At least 85 of 100 digits of the test set must be classified correctly.
"""

from __future__ import annotations

import argparse

import ray
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import pycoll.ray
from pycoll import parallel as pc

STEPS, BATCH, NUM_TEST = 400, 128, 397


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Images, (1797, 1, 8, 8), and their digits, in an order that is the same in all processes."""
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return x[order], torch.tensor(digits)[order]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 10)
    )


def serve(job: pycoll.ray.Job, options: dict) -> None:
    pc.ps.start(job.comm, **options).serve()


def work(job: pycoll.ray.Job, options: dict) -> float:
    """Trains on batches of this worker's own; returns the accuracy on the test set."""
    part = pc.ps.start(job.comm, **options)
    x, y = samples()
    model = convolutional()
    part.worker.register(model)
    random = torch.Generator().manual_seed(job.actor)
    for _ in range(STEPS):
        batch = torch.randint(NUM_TEST, len(x), (BATCH,), generator=random)
        part.worker.pull()
        model.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        part.worker.push()
        part.worker.clock()
    part.worker.pull()
    part.close()
    return (model(x[:NUM_TEST]).argmax(1) == y[:NUM_TEST]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mode", default="sync", help="sync, async and others of pc.ps.run")
    parser.add_argument("--address", help="of a cluster; default: a new one on this machine")
    args = parser.parse_args()

    options = {"servers": args.servers, "mode": args.mode, "optimizer": pc.ps.SGD(0.2)}
    ray.init(args.address)
    role = pycoll.ray.Role
    roles = {"server": role(args.servers, num_cpus=0.5), "worker": role(args.workers, num_cpus=0.5)}
    with pycoll.ray.start(roles) as world:
        found = world.run({"server": serve, "worker": work}, options)
    ray.shutdown()
    accuracy = found[-1]
    print(f"{args.workers} workers, {args.mode}: accuracy {accuracy:.4f}, target 0.85")
    if accuracy < 0.85:
        raise SystemExit("the target was not reached")


if __name__ == "__main__":
    main()
