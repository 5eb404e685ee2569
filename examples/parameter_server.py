"""Digits with a parameter server: two servers, and the other ranks as workers.

pycoll run -n 5 examples/parameter_server.py
pycoll run -n 5 examples/parameter_server.py --mode ssp --staleness 3
pycoll run -n 5 examples/parameter_server.py --mode async --copies 2

At least 93 of 100 digits of the test set must be classified correctly.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc

EPOCHS, BATCH, NUM_TEST = 8, 48, 397


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--servers", type=int, default=2)
    options.add_argument("--mode", default="sync")
    options.add_argument("--staleness", type=int)
    options.add_argument("--k", type=int)
    options.add_argument("--copies", type=int, default=1)
    args = options.parse_args()

    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]

    with pc.ps.run(**vars(args), optimizer=pc.ps.Adagrad(0.05)) as w:  # servers end here
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        w.register(model)
        for epoch in range(EPOCHS):
            shuffled = train[
                torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
            ]
            for batch_x, batch_y in w.shard((x[i], y[i]) for i in shuffled.split(BATCH)):
                w.pull()
                functional.cross_entropy(model(batch_x), batch_y).backward()
                w.push()
                w.clock()
        w.pull()
        accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
        if w.number == 0:
            print(w.report())
    print(f"worker {w.number} of {w.num_workers}: accuracy {accuracy:.4f}, target 0.93")
    if accuracy < 0.93:
        raise SystemExit("the target was not reached")


if __name__ == "__main__":
    main()
