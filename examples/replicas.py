"""Digits with replicas that differ: all-reduce, gossip or local steps, from one script.

pycoll run -n 4 examples/replicas.py
pycoll run -n 4 --replicas gossip:graph=ring,compress=int8 examples/replicas.py
pycoll run -n 4 --replicas local:steps=10 examples/replicas.py
pycoll run -n 4 --replicas ps:mode=ssp,staleness=2 examples/replicas.py --momentum 0 --epochs 12

Late gradients act like momentum: with 0.9 of the optimizer's own, asynchronous training diverges.
At least 93 of 100 digits of the test set must be classified correctly by the mean of the weights.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc

BATCH, NUM_TEST = 64, 397


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epochs", type=int, default=6)
    options.add_argument("--lr", type=float, default=0.1)
    options.add_argument("--momentum", type=float, default=0.9)
    args = options.parse_args()
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]

    mesh = pc.mesh(dp=-1)
    with pc.keyed_init(mesh, seed=0):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = pc.parallelize(model, mesh, replicas="allreduce")  # --replicas names another way
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    optimizer = pc.optimizer(sgd)
    begun_s = time.monotonic()
    for epoch in range(args.epochs):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        for batch_x, batch_y in pc.shard([(x[i], y[i]) for i in shuffled.split(BATCH)], mesh):
            model.step(batch_x, batch_y, loss=functional.cross_entropy)
            optimizer.step()
    seconds = time.monotonic() - begun_s
    sent = torch.tensor([sum(entry.nbytes for entry in mesh.ledger.entries.values())])
    mesh.world.all_reduce(sent)
    with optimizer.mean_weights():
        accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    optimizer.close()
    if mesh.world.rank == 0:
        print(
            f"{mesh.world.size} ranks: accuracy {accuracy:.4f}, target 0.93; {seconds:.2f} s, "
            f"{sent.item() / 1e6:.2f} MB sent by all ranks"
        )
    if accuracy < 0.93:
        raise SystemExit("the target was not reached")


if __name__ == "__main__":
    main()
