"""Digits on Ray: ranks as actors; killed ones are restarted by Ray and return to the training.

python examples/on_ray.py --ranks 4                 # a cluster of this machine
python examples/on_ray.py --ranks 4 --address auto  # the cluster that this machine belongs to
python examples/on_ray.py --ranks 4 --kill 2        # rank 2 is killed at half of the steps

At least 93 of 100 digits of the test set must be classified correctly.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np
import ray
from sklearn.datasets import load_digits

import pycoll
import pycoll.ray

STEPS, BATCH, NUM_TEST, RATE = 300, 64, 397, 0.5


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradient of the sum of cross entropies of a softmax regression, of shape (65, 10)."""
    logits = x @ weights
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p


def train(job: pycoll.ray.Job, x: np.ndarray, y: np.ndarray, killed: int) -> np.ndarray:
    """Trains on every rank, and again on a restarted one; returns the weights, (65, 10)."""
    weights, step = np.zeros((x.shape[1], 10)), np.zeros(1, np.int64)

    def receive_state() -> None:
        job.comm.broadcast(weights, root=0)
        job.comm.broadcast(step, root=0)

    if job.is_restarted:
        receive_state()
    while step < STEPS:
        if job.actor == killed and step == STEPS // 2 and not job.is_restarted:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = np.random.default_rng(int(step[0])).choice(len(x), BATCH, replace=False)
        mine = np.array_split(batch, job.comm.size)[job.comm.rank]
        try:
            total = job.comm.all_reduce(gradient(weights, x[mine], y[mine]))
            weights -= RATE / BATCH * total
            step += 1
        except pycoll.PeerDiedError as error:
            print(f"step {step[0]}: {error}")
            job.recover()
            receive_state()
            print(f"step {step[0]}: the ranks are those of actors {job.actors}")
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--address", help="of a cluster; default: a new one on this machine")
    parser.add_argument("--kill", type=int, default=-1, help="rank that is killed")
    args = parser.parse_args()

    pixels, digits = load_digits(return_X_y=True)
    x = np.concatenate([pixels / 16, np.ones((len(pixels), 1))], axis=1)
    test, rest = np.split(np.random.default_rng(0).permutation(len(x)), [NUM_TEST])
    ray.init(args.address, num_cpus=None if args.address else args.ranks)
    with pycoll.ray.start(args.ranks, strategy="SPREAD", max_restarts=-1) as world:
        found = world.run(train, x[rest], digits[rest], args.kill)
    ray.shutdown()
    if any(not np.array_equal(weights, found[0]) for weights in found):
        raise SystemExit("the ranks have different weights")
    accuracy = ((x[test] @ found[0]).argmax(1) == digits[test]).mean()
    print(f"{args.ranks} ranks: accuracy {accuracy:.4f}, target 0.93")
    if accuracy < 0.93:
        raise SystemExit("the target was not reached")


if __name__ == "__main__":
    main()
