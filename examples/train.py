"""Trains a GPT on local text, with what a project needs: settings, checkpoints, evaluation, plots.

python examples/train.py
pycoll run --mesh dp=2,tp=2 examples/train.py examples/train.toml --set train.steps=50

A job that was killed goes on from its last checkpoint if it is started again, on any mesh. Tokens
are the bytes of the text.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pycoll import parallel as pc

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

VOCAB = 256
PLAN = {"*.qkv": "qkv", "*.up": "col", "*.out|*.down": "row", "token|head": "vocab"}
Cache = list[Tensor]  # keys and values of this rank's heads, for all earlier tokens


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_BTD)).chunk(3, dim=-1)
        )
        first = cache is None or not cache
        if cache is not None:
            cache[:] = (k, v) if first else (torch.cat(pair, 2) for pair in zip(cache, (k, v)))  # noqa: B905
            k, v = cache
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=first)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BTD + self.down(functional.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, dim), nn.Embedding(context, dim)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.3)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens_BT: Tensor, caches: list[Cache] | None = None) -> Tensor:
        start = caches[0][0].shape[2] if caches and caches[0] else 0
        x_BTD = self.token(tokens_BT)
        x_BTD = x_BTD + self.place(torch.arange(start, start + tokens_BT.shape[1]))
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD) if caches is None else block(x_BTD, caches[i])
        return self.head(self.norm(x_BTD))


class Windows:
    """Consecutive windows of the text: inputs, and the tokens that follow them."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        at = i * self.context
        window = self.tokens[at : at + self.context + 1].long()
        return window[:-1], window[1:]


@torch.no_grad()
def generate(model: nn.Module, tokens_BT: Tensor, count: int) -> Tensor:
    """Appends the likeliest tokens, one after the other; each rank of tp caches its own heads."""
    caches: list[Cache] = [[] for _ in model.blocks]
    new = tokens_BT
    for _ in range(count):
        logits = model(new, caches)  # whole on each rank
        new = logits[:, -1:].argmax(-1)
        tokens_BT = torch.cat([tokens_BT, new], 1)
    return tokens_BT


def right(logits: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The number of tokens that are guessed, and of all."""
    return (logits.argmax(-1) == target).sum(), target.numel()


def evaluate(model: Any, held_out: Windows, batch: int, mesh: pc.Mesh) -> dict[str, float]:
    """The means over the text that is held out."""
    sums, count = {"loss": 0.0, "right": 0.0}, 0
    model.eval()
    for i in range(0, len(held_out) - batch + 1, batch):
        x, y = (
            torch.stack(of) for of in zip(*(held_out[i + j] for j in range(batch)), strict=True)
        )
        for of_x, of_y in pc.shard([(x, y)], mesh):
            found = model.evaluate(of_x, of_y, loss=pc.cross_entropy, metrics={"right": right})
        sums = {name: sums[name] + found[name] for name in sums}
        count += 1
    model.train()
    return {name: value / max(count, 1) for name, value in sums.items()}


def plot(folder: Path) -> None:
    """Draws the losses of metrics.jsonl, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    axes = (figure := Figure(layout="constrained")).subplots()
    for name in ("loss", "held_out_loss"):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    figure.savefig(folder / "loss.svg")


def settings() -> dict[str, dict[str, Any]]:
    """The settings of the file, with those of the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).with_suffix(".toml")
    options.add_argument("file", nargs="?", default=default, type=Path, help="settings, TOML")
    options.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="train.steps=50",
        help="replaces a setting of the file; may be repeated",
    )
    args = options.parse_args()
    found = tomllib.loads(args.file.read_text())
    for text in args.set:
        place, _, value = text.partition("=")
        section, _, name = place.partition(".")
        if name not in found.get(section, {}):
            raise SystemExit(f"--set {text}: there is no such setting in {args.file}")
        found[section][name] = tomllib.loads(f"x = {value}")["x"]
    return found


def main() -> None:
    config = settings()
    train, run, context = config["train"], config["run"], config["model"]["context"]
    files = [Path(name).read_bytes() for name in config["data"]["text"]]
    text = b"\n".join(files or [topic.encode() for topic in topics.values()])
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    end = round(len(tokens) * (1 - config["data"]["held_out"]))
    held_out = Windows(tokens[end:], context)

    mesh = pc.mesh(dp=-1)
    with pc.keyed_init(mesh, seed=train["seed"]):
        model = GPT(**config["model"])
    count = pc.flops(model, torch.zeros(1, context, dtype=torch.int64)).per_sample
    model = pc.parallelize(
        model, mesh, tp=PLAN, pp="blocks", zero=train["zero"], precision=train["precision"]
    )
    adam = torch.optim.AdamW(model.parameters(), lr=train["learning_rate"])
    optimizer = pc.optimizer(adam, clip=train["clip"])
    loader = pc.loader(Windows(tokens[:end], context), train["batch"], mesh, seed=train["seed"])
    steps, warmup = train["steps"], train["warmup"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * i / steps))
    )
    scaler = pc.GradScaler("cpu", enabled=train["precision"] == "fp16")
    state = {"loader": loader, "schedule": schedule, "scaler": scaler}
    folder = Path(run["folder"])
    if list(folder.glob("step-*")):
        pc.load(folder, model, optimizer, state=state)
    writer = pc.JsonLines(folder / "metrics.jsonl")
    step = pc.trainer_of(model).step_idx
    while step < steps:
        for x, y in loader:
            out = model.step(
                x, y, loss=pc.cross_entropy, microbatches=train["microbatches"], scaler=scaler
            )
            optimizer.step()
            schedule.step()
            pc.log(out, every=20, total=steps, writers=[writer], flops_per_sample=count)
            step += 1
            if step % run["evaluate_every"] == 0:
                found = evaluate(model, held_out, train["batch"], mesh)
                numbers = {f"held_out_{name}": value for name, value in found.items()}
                if mesh.world.rank == 0:
                    writer.write({"step": step, **numbers})
            if step % run["save_every"] == 0 or step == steps:
                pc.save_in_background(folder, model, optimizer, state=state)
            if step == steps:
                break
    pc.trainer_of(model).finish_saving()
    found = evaluate(model, held_out, train["batch"], mesh)
    if mesh.world.rank == 0:
        plot(folder)
    if mesh.size("pp") == mesh.size("cp") == 1 and run["generate"]:  # the whole model is needed
        prompt = tokens[end : end + context // 2].long()[None]
        wanted = min(run["generate"], context - prompt.shape[1])
        made = bytes(generate(model.eval(), prompt, wanted)[0].tolist())
        if mesh.world.rank == 0:
            print(repr(made.decode(errors="replace")))
    if mesh.world.rank == 0:
        print(f"{mesh.sizes}: held out: loss {found['loss']:.4f}, right {found['right']:.1%}")


if __name__ == "__main__":
    main()
