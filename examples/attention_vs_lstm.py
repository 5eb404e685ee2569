"""Why attention is trained in parallel and an LSTM is not: Amdahl's law from the traced graph.

python examples/attention_vs_lstm.py
python examples/attention_vs_lstm.py --ranks 1,2,4,8 --seconds 2

Both layers have the same width and read one sequence, which ranks share out by positions. An
operator whose result has a row for each position is shared out; a step of the LSTM needs the step
before it. The parallel share is one minus the longest chain of steps over all operations.

The speed-up is measured on ranks that sleep in place of the arithmetic, so that they need no cores
of their own; the activations that they exchange are real.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

import pycoll
from pycoll.parallel.tools import scaling_laws as laws

POSITIONS, WIDTH = 48, 64  # no other dimension has the size of POSITIONS


class Attention(nn.Module):
    """Self-attention: x [positions, width]; all positions at once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=1)
        return self.out(functional.softmax(q @ k.T / WIDTH**0.5, dim=1) @ v)


class LSTM(nn.Module):
    """An LSTM: x [positions, width]; its input products at once, its steps one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, 4 * WIDTH)
        self.recurrent = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(1, WIDTH)
        hidden = []
        for gates_x in self.input(x).split(1):
            i, f, g, o = (gates_x + self.recurrent(h)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            hidden.append(h)
        return torch.cat(hidden)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive operators: whether their positions can be shared out, and their operations."""

    shared: bool
    operations: int


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced layer.

    Attributes:
        operations: Operations of the forward pass.
        chain: Operations of the longest chain of operators that cannot be shared out.
        parts: The operators in their order.
    """

    operations: int
    chain: int
    parts: list[Part]

    @property
    def parallel(self) -> float:
        return 1 - self.chain / self.operations


def operations(node: Node) -> int:
    """Operations of an operator: those of a product, else one for each element; views have none."""
    result, operator = node.meta.get("val"), node.target
    if not isinstance(operator, OpOverload) or not isinstance(result, Tensor) or operator.is_view:
        return 0
    values = [of.meta["val"] if isinstance(of, Node) else of for of in node.args]
    count = flop_registry.get(operator.overloadpacket)
    return count(*values, out_val=result) if count else result.numel()


def trace(layer: nn.Module) -> Traced:
    """Traces the forward pass on tensors without values."""

    def forward(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, (x,))

    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    graph = make_fx(forward, tracing_mode="fake")(weights, torch.zeros(POSITIONS, WIDTH)).graph
    chains: dict[Node, int] = {}  # the longest chain that ends with each operator
    found: list[Part] = []
    for node in graph.nodes:
        count = operations(node)
        shared = count > 0 and POSITIONS in node.meta["val"].shape
        before = max((chains[of] for of in node.all_input_nodes), default=0)
        chains[node] = before + (0 if shared else count)
        found += [Part(shared, count)] if count else []
    parts = [
        Part(shared, sum(part.operations for part in run))
        for shared, run in groupby(found, key=lambda part: part.shared)
    ]
    return Traced(sum(part.operations for part in parts), max(chains.values()), parts)


def run(comm: pycoll.Communicator, traced: Traced, seconds: float) -> float:
    """Seconds of the layer on ranks that sleep; one rank takes `seconds`."""
    rows = np.zeros((-(-POSITIONS // comm.size), WIDTH), np.float32)
    comm.barrier()
    start = time.perf_counter()
    for part in traced.parts:
        needs_s = seconds * part.operations / traced.operations
        if part.shared:
            time.sleep(needs_s / comm.size)
            comm.all_gather(rows)
        else:
            time.sleep(needs_s if comm.rank == 0 else 0)
            comm.broadcast(rows)
    comm.barrier()
    return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks, 1 among them")
    options.add_argument("--seconds", type=float, default=1.0, help="time of one rank")
    args = options.parse_args()
    ranks = [int(n) for n in args.ranks.split(",")]
    print("layer      parallel  limit  ranks  speed-up   law  law / speed-up")
    for layer in (Attention(), LSTM()):
        traced = trace(layer)
        limit = min(laws.amdahl_limit(traced.parallel), POSITIONS)
        times = {
            n: min(
                pycoll.run_ranks(run, n, traced, args.seconds, threads=True)[0] for _ in range(2)
            )
            for n in ranks
        }
        for n in ranks:
            speed_up, law = times[1] / times[n], laws.amdahl(traced.parallel, n)
            name = type(layer).__name__
            print(
                f"{name:<9}  {traced.parallel:8.1%}  {limit:5.1f}  {n:5}  {speed_up:8.2f}  "
                f"{law:4.2f}  {law / speed_up:14.2f}"
            )


if __name__ == "__main__":
    main()
