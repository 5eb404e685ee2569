"""Gradient descent by map and reduce: broadcast the weights, map shards, reduce, step.

pycoll run -n 1 examples/mapreduce_gd.py
pycoll run -n 4 examples/mapreduce_gd.py

Logistic regression on the digits, 5 or more against the others. The weights are those of one
process to the last bit. The maps of all ranks together take the CPU time of one process.
"""

from __future__ import annotations

import time

import numpy as np
from sklearn.datasets import load_digits

import pycoll
from pycoll import parallel as pc

SHARDS, STEPS, RATE = 16, 50, 1.0


def main() -> None:
    comm = pycoll.init()
    pixels, classes = load_digits(return_X_y=True)
    x, y = pixels / 16, (classes >= 5).astype(float)
    shards = np.array_split(np.arange(len(x)), SHARDS)
    w = np.zeros(x.shape[1])

    def gradient(shard: np.ndarray) -> np.ndarray:
        """The gradient of the sum of the losses of a shard."""
        share = 1 / (1 + np.exp(-x[shard] @ w))
        return x[shard].T @ (share - y[shard])

    mapped_s, wall_s = 0.0, time.monotonic()

    def timed(shard: np.ndarray) -> np.ndarray:
        nonlocal mapped_s
        begun_s = time.thread_time()
        found = gradient(shard)
        mapped_s += time.thread_time() - begun_s
        return found

    for _ in range(STEPS):
        comm.broadcast(w)  # n bytes along each edge of a tree
        w -= RATE / len(x) * pc.map_reduce(timed, shards, comm=comm)
    wall_s = time.monotonic() - wall_s
    of_all = comm.all_reduce(np.array([mapped_s]))
    accuracy = ((x @ w > 0) == (y > 0.5)).mean()
    if comm.rank == 0:
        print(
            f"{comm.size} ranks: accuracy {accuracy:.4f}, first weights {w[1:4]}, "
            f"{of_all[0]:.3f} CPU seconds of maps on all ranks, {wall_s:.3f} s by the clock"
        )


if __name__ == "__main__":
    main()
