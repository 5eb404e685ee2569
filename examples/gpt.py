"""Trains a GPT on Python's own documentation, in one process or on any mesh.

python examples/gpt.py
pycoll run --mesh dp=4 examples/gpt.py
pycoll run --mesh dp=2,tp=2,pp=2 examples/gpt.py
pycoll run --mesh dp=2,cp=2 examples/gpt.py

Its loss must be lower than the bigram entropy of the text, the entropy of a character when the
previous character is known.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc

DIM, DEPTH, HEADS, CONTEXT = 64, 4, 4, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.drop = nn.Dropout(0.05)
        self.heads = HEADS

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_BTD)).chunk(3, dim=-1)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x_BTD = x_BTD + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x_BTD + self.drop(self.down(functional.gelu(self.up(self.norm_2(x_BTD)))))


class GPT(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.3)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, vocab, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token(tokens_BT) + self.place(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def bigram_entropy(text: str) -> float:
    """Returns the nats per character when the previous character is known."""
    pairs, firsts = Counter(zip(text, text[1:], strict=False)), Counter(text[:-1])
    counts = ((count, firsts[first]) for (first, _), count in pairs.items())
    return -sum(n * math.log(n / of) for n, of in counts) / (len(text) - 1)


def batches(tokens: torch.Tensor, steps: int, size: int):
    """Yields windows of the text at random places, identical on all ranks."""
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        at = torch.randint(len(tokens) - CONTEXT, (size, 1), generator=random)
        window = tokens[at + torch.arange(CONTEXT + 1)]
        yield window[:, :-1], window[:, 1:]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--batch", type=int, default=24)
    options.add_argument("--microbatches", type=int, default=4)
    options.add_argument("--schedule", default="1f1b")
    options.add_argument("--zero", type=int, default=1)
    options.add_argument("--device", help="such as cuda")
    args = options.parse_args()
    text = "".join(topics.values())
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])

    mesh = pc.mesh(dp=-1, device=args.device)  # `pycoll run --mesh` overrides it
    with pc.keyed_init(mesh, seed=0):
        model = GPT(len(letters))
    model = pc.parallelize(
        model,
        mesh,
        tp={"*.qkv": "qkv", "*.up": "col", "*.out|*.down": "row", "token|head": "vocab"},
        pp="blocks",
        schedule=args.schedule,
        zero=args.zero,
    )
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=6e-3), clip=1.0)
    losses = []
    for x, y in pc.shard(batches(tokens, args.steps, args.batch), mesh):
        out = model.step(x, y, loss=pc.cross_entropy, microbatches=args.microbatches)
        optimizer.step()
        pc.log(out, every=20, total=args.steps)
        losses.append(out.loss)
    loss, target = sum(losses[-20:]) / len(losses[-20:]), bigram_entropy(text)
    if mesh.world.rank == 0:
        print(f"{mesh.sizes}: loss {loss:.4f}, bigram entropy {target:.4f}")
    if args.steps >= 200 and loss >= target:
        raise SystemExit(f"the loss {loss:.4f} does not beat the bigram entropy {target:.4f}")


if __name__ == "__main__":
    main()
