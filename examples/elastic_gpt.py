"""Trains a GPT whose ranks may be killed: the others go on, and new processes take their places.

pycoll run --elastic 1:4 examples/elastic_gpt.py

Kill what you like meanwhile, by the process ids that it prints: the losses do not change.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics
from typing import Any

import torch
from gpt import CONTEXT, GPT
from torch import Tensor

from pycoll import parallel as pc


class Windows:
    """Windows of Python's own documentation, by number."""

    def __init__(self) -> None:
        text = "".join(topics.values())
        letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
        self.vocab = len(letters)
        self._tokens = torch.tensor([letters[letter] for letter in text])

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // CONTEXT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self._tokens[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--batch", type=int, default=24)
    args = options.parse_args()
    data = Windows()

    def build(mesh: pc.Mesh) -> dict[str, Any]:
        with pc.keyed_init(mesh, seed=0):
            model = GPT(data.vocab)
        tp = {"*.qkv": "qkv", "*.up": "col", "*.out|*.down": "row", "token|head": "vocab"}
        model = pc.parallelize(model, mesh, tp=tp, pp="blocks", zero=1)
        optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=6e-3), clip=1.0)
        return {
            "model": model,
            "optimizer": optimizer,
            "loader": pc.loader(data, args.batch, mesh, seed=1),
        }

    def train(job: pc.Job) -> None:
        world = job.mesh.world
        print(f"process {os.getpid()} is rank {world.rank} of {world.size}")
        while job.commits < args.steps:
            for x, y in job.loader:
                out = job.model.step(x, y, loss=pc.cross_entropy)
                job.update()
                if job.commits % 20 == 0 and world.rank == 0:
                    print(f"step {job.commits}: loss {out.loss:.4f}")
                if job.commits == args.steps:
                    return

    pc.elastic(build, train)


if __name__ == "__main__":
    main()
