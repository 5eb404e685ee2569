"""Gradient descent by MapReduce: broadcast the weights, map shards to gradients, reduce, step.

python examples/mapreduce_gd.py --ranks 1,2
python examples/mapreduce_gd.py --ranks 1,2,4,8 --wait-ms 20 --plot mapreduce.svg

Softmax regression on digits, with the gradient of all samples in each step. Each number of ranks
must end at the weights of a plain loop in one process, up to 1e-10, and send the weights, and the
gradient, once over each edge of a tree. With more ranks the wall clock falls; the CPU time of the
map, over all ranks, stays.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # a rank computes on one core
os.environ["PYCOLL_ALGO"] = "broadcast:binomial;reduce:binomial"

import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import pycoll
from pycoll.parallel import map_reduce
from pycoll.parallel.tools import scaling_laws

NUM_SHARDS, COPIES, RATE = 16, 20, 0.5
CLASSES = 10
Shard = tuple[np.ndarray, np.ndarray]


def samples() -> Shard:
    """Pixels and a one, of each digit several times so that a step takes a while; the digits."""
    pixels, digits = load_digits(return_X_y=True)
    x = np.concatenate([pixels / 16, np.ones((len(pixels), 1))], axis=1)
    return np.tile(x, (COPIES, 1)), np.tile(digits, COPIES)


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradient of the sum of cross entropies, of shape (65, 10)."""
    logits = x @ weights
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p


def train(comm: pycoll.Communicator, data: Shard, steps: int, wait_s: float) -> dict[str, Any]:
    """Trains; returns weights, seconds, CPU seconds of this rank's map, and bytes that it sent."""
    x, y = data
    shards = list(zip(np.array_split(x, NUM_SHARDS), np.array_split(y, NUM_SHARDS), strict=True))
    weights = np.zeros((x.shape[1], CLASSES))
    cpu_s = 0.0

    def mapped(shard: Shard) -> np.ndarray:
        nonlocal cpu_s
        time.sleep(wait_s)  # as if the shard were read from a disk
        begun_cpu_s = time.thread_time()
        result = gradient(weights, *shard)
        cpu_s += time.thread_time() - begun_cpu_s
        return result

    comm.barrier()
    begun_s = time.monotonic()
    sent = {"broadcast": 0, "map_reduce": 0}
    for _ in range(steps):
        before = comm.ledger["sent_bytes"]
        comm.broadcast(weights, root=0)
        sent["broadcast"] += comm.ledger["sent_bytes"] - before
        before = comm.ledger["sent_bytes"]
        total = map_reduce(mapped, shards, "sum", root=0, deterministic=False, comm=comm)
        sent["map_reduce"] += comm.ledger["sent_bytes"] - before
        if comm.rank == 0:
            weights -= RATE / len(x) * total
    spent = {"wall": time.monotonic() - begun_s, "cpu": cpu_s}
    before = comm.ledger["sent_bytes"]
    comm.all_reduce(np.full(NUM_SHARDS + 1, -1), "max")  # by which map_reduce agrees on failures
    agreement = comm.ledger["sent_bytes"] - before
    sent["reduce"] = sent.pop("map_reduce") - steps * agreement
    return {"weights": weights, **spent, **sent}


def plain_loop(data: Shard, steps: int) -> np.ndarray:
    x, y = data
    weights = np.zeros((x.shape[1], CLASSES))
    for _ in range(steps):
        weights -= RATE / len(x) * gradient(weights, x, y)
    return weights


def plot(path: Path, rows: list[dict[str, Any]], law: scaling_laws.Fit) -> None:
    from matplotlib.figure import Figure

    from pycoll.draw.style import deliver_figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    speed, seconds = figure.subplots(1, 2)
    ranks = [row["ranks"] for row in rows]
    many = np.linspace(1, max(ranks), 50)
    speed.plot(many, many, ":", color="#c9ccd1", label="linear")
    curve = [scaling_laws.amdahl(law.parallel, n) for n in many]
    speed.plot(many, curve, color="#332288", label=f"Amdahl, {law.parallel:.1%} parallel")
    speed.plot(ranks, [row["speed_up"] for row in rows], "o", color="#cc6677", label="measured")
    speed.set(xlabel="ranks", ylabel="speed-up", xticks=ranks)
    speed.legend(frameon=False)
    seconds.plot(ranks, [row["wall"] for row in rows], "o-", color="#44aa99", label="wall clock")
    seconds.plot(
        ranks,
        [row["cpu"] for row in rows],
        "o-",
        color="#117733",
        label="CPU of the map, all ranks",
    )
    seconds.set(xlabel="ranks", ylabel="seconds", xticks=ranks, ylim=(0, None))
    seconds.legend(frameon=False)
    deliver_figure(figure, path.suffix[1:], path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, 1 among them")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--wait-ms", type=float, default=0, help="waiting time of each shard")
    parser.add_argument("--plot", type=Path, help="file for a picture of speed-up and seconds")
    args = parser.parse_args()

    data = samples()
    expected = plain_loop(data, args.steps)
    rows = []
    for n in map(int, args.ranks.split(",")):
        found = pycoll.run_ranks(train, n, data, args.steps, args.wait_ms / 1e3)
        difference = np.abs(found[0]["weights"] - expected).max()
        row: dict[str, Any] = {"ranks": n, "wall": found[0]["wall"], "difference": difference}
        row["cpu"] = sum(of_rank["cpu"] for of_rank in found)
        for name in ("broadcast", "reduce"):
            total = sum(of_rank[name] for of_rank in found)
            row[name] = total / args.steps / (n - 1) if n > 1 else expected.nbytes
        if difference > 1e-10 or {row["broadcast"], row["reduce"]} != {expected.nbytes}:
            raise SystemExit(f"not the weights of one process, or other bytes: {row}")
        rows.append(row)
    law = scaling_laws.fit_amdahl({row["ranks"]: row["wall"] for row in rows})
    print("ranks  wall s  CPU s  speed-up   law  bytes per edge: broadcast, reduce  difference")
    for row in rows:
        row["speed_up"] = rows[0]["wall"] / row["wall"]
        print(
            f"{row['ranks']:5}  {row['wall']:6.2f}  {row['cpu']:5.2f}  {row['speed_up']:8.2f}  "
            f"{scaling_laws.amdahl(law.parallel, row['ranks']):4.2f}  "
            f"{row['broadcast']:25.0f}, {row['reduce']:6.0f}  {row['difference']:10.1e}"
        )
    if args.plot:
        plot(args.plot, rows, law)


if __name__ == "__main__":
    main()
