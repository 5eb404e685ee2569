"""Handwritten digits, data parallel: the same weights on any number of ranks.

python examples/digits.py
pycoll run -n 3 examples/digits.py

Batches need not be divisible by the number of ranks, and batch normalisation uses the whole batch.
At least 97 of 100 digits of the test set must be classified correctly.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc

EPOCHS, BATCH, NUM_TEST = 8, 50, 397


def main() -> None:
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]

    mesh = pc.mesh(dp=-1)
    with pc.keyed_init(mesh, seed=0):
        model = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
        )
    model = pc.parallelize(model, mesh, zero=1)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=5e-3), clip=1.0)
    for epoch in range(EPOCHS):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        for batch_x, batch_y in pc.shard([(x[i], y[i]) for i in shuffled.split(BATCH)], mesh):
            out = model.step(batch_x, batch_y, loss=functional.cross_entropy)
            optimizer.step()
        pc.log(out)
    model.eval()
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    if mesh.world.rank == 0:
        print(f"{mesh.world.size} ranks: accuracy {accuracy:.4f}, target 0.97")
    if accuracy < 0.97:
        raise SystemExit("the target was not reached")


if __name__ == "__main__":
    main()
