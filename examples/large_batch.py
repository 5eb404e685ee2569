"""Large batches: LAMB keeps the accuracy that SGD, tuned once for a small batch, loses.

python examples/large_batch.py
pycoll run -n 2 examples/large_batch.py

A batch of 512 handwritten digits leaves 90 steps where one of 16 has 2,700. SGD keeps the learning
rate that is best for 16; LAMB's grows with the square root of the batch. The replicas share out the
optimizer's state (zero=1), so LAMB's norms are those of pieces, added up.
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc

EPOCHS, SMALL, LARGE, NUM_TEST, NUM_RUNS = 30, 16, 512, 360, 2
OPTIMIZERS = {
    "SGD": lambda model, times: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "LAMB": lambda model, times: pc.optim.LAMB(model.parameters(), lr=0.02 * math.sqrt(times)),
}


def accuracy(mesh: pc.Mesh, name: str, batch: int, seed: int) -> float:
    """Percentage of the test digits that are classified correctly after training."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    with pc.keyed_init(mesh, seed=seed):
        model = nn.Sequential(
            *[nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
        )
    model = pc.parallelize(model, mesh, zero=1)
    optimizer = pc.optimizer(OPTIMIZERS[name](model, batch / SMALL))
    num_steps = math.ceil(len(train) / batch) * EPOCHS
    warmup = num_steps / 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * (1 - step / num_steps)
    )
    random = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        shuffled = train[torch.randperm(len(train), generator=random)]
        for part_x, part_y in pc.shard([(x[i], y[i]) for i in shuffled.split(batch)], mesh):
            model.step(part_x, part_y, loss=functional.cross_entropy)
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return 100 * (model(x[test]).argmax(1) == y[test]).float().mean().item()


def main() -> None:
    torch.set_num_threads(1)
    mesh = pc.mesh(dp=-1)
    found = {}
    for name in OPTIMIZERS:
        for batch in (SMALL, LARGE):
            runs = [accuracy(mesh, name, batch, seed) for seed in range(NUM_RUNS)]
            found[name, batch] = sum(runs) / NUM_RUNS
            if mesh.world.rank == 0:
                print(f"{name:4} batch {batch:3}: accuracy {found[name, batch]:5.2f} %", flush=True)
    lost = {name: found[name, SMALL] - found[name, LARGE] for name in OPTIMIZERS}
    if lost["LAMB"] > 1.5 or lost["SGD"] < 3:
        raise SystemExit(f"expected LAMB to lose at most 1.5 points, and SGD 3 or more: {lost}")


if __name__ == "__main__":
    main()
