"""Odd arguments of torch's collectives over pycoll: an exception, or a call that works.

Most are refused by torch, the rest by pycoll. Both ranks make the same call in a group of its own.
If both are refused, or both calls return, the group must work afterwards; the group of all must
always work.
"""

from __future__ import annotations

import datetime
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import odd_values
import torch
import torch.distributed as dist
from isolated import Notes, run_isolated
from torch_ranks import run_group

from injections import Outcome
from pycoll.arguments import shown

CASES = 20
FEW = (1,)
CALLS = 20  # of a case
RANKS = 2
GROUP = datetime.timedelta(seconds=3)
DEADLINE_S = 200.0


def tensors() -> list[Any]:
    x = torch.ones(4)
    half = [
        torch.ones(4, dtype=each) for each in (torch.float16, torch.bfloat16, torch.float8_e5m2)
    ]
    return [
        torch.ones(0),
        torch.tensor(1.0),
        torch.ones(3),
        torch.ones(4, 4).t()[1:],
        torch.ones(8)[::2],
        torch.ones(4, device="meta"),
        torch.eye(4).to_sparse(),
        torch.ones(1).expand(1 << 20),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(4, dtype=torch.bool),
        x.requires_grad_(),
        torch.ones(4, dtype=torch.complex32),
        torch.ones(4, dtype=torch.int16),
        *half,
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        torch.ones(2, 2).to_sparse_csr(),
        torch.nn.Parameter(torch.ones(4)),
        torch.ones(4, dtype=torch.uint16),
        torch.empty(4).untyped_storage(),
        [torch.ones(4)],
        [torch.ones(4), torch.ones(3)],
        [torch.ones(4), torch.ones(4, dtype=torch.int8)],
        [torch.ones(4)] * 3,
        [torch.ones(4), None],
        (),
        [torch.ones(4), torch.ones(4, device="meta")],
    ]


def splits() -> list[Any]:
    return [
        [2, 2],
        [4, 0],
        [-1, 5],
        [5],
        [1 << 62, 1 << 62],
        [1.5, 2.5],
        ["a", "b"],
        (2, 2),
        [2, 3],
    ]


def ops() -> list[Any]:
    known = ("SUM", "AVG", "BAND", "BXOR", "MAX", "PRODUCT", "PREMUL_SUM")
    return [getattr(dist.ReduceOp, name) for name in known]


def pair() -> list[torch.Tensor]:
    return [torch.ones(4), torch.ones(4)]


# Arguments with which each call works, on both ranks.
CALLABLES: dict[str, Callable[[], dict[str, Any]]] = {
    "all_reduce": lambda: {"tensor": torch.ones(4), "op": dist.ReduceOp.SUM},
    "broadcast": lambda: {"tensor": torch.ones(4), "src": 0},
    "reduce": lambda: {"tensor": torch.ones(4), "dst": 0, "op": dist.ReduceOp.SUM},
    "all_gather": lambda: {"tensor_list": pair(), "tensor": torch.ones(4)},
    "all_gather_into_tensor": lambda: {
        "output_tensor": torch.ones(8),
        "input_tensor": torch.ones(4),
    },
    "reduce_scatter": lambda: {"output": torch.ones(4), "input_list": pair()},
    "reduce_scatter_tensor": lambda: {"output": torch.ones(4), "input": torch.ones(8)},
    "all_to_all": lambda: {"output_tensor_list": pair(), "input_tensor_list": pair()},
    "all_to_all_single": lambda: {
        "output": torch.ones(4),
        "input": torch.ones(4),
        "output_split_sizes": None,
        "input_split_sizes": None,
    },
    "gather": lambda: {"tensor": torch.ones(4), "gather_list": pair(), "dst": 0},
    "scatter": lambda: {"tensor": torch.ones(4), "scatter_list": pair(), "src": 0},
    "isend": lambda: {"tensor": torch.ones(4), "dst": 1, "tag": 0},
    "irecv": lambda: {"tensor": torch.ones(4), "src": 1, "tag": 0},
    "barrier": lambda: {"device_ids": None},
}


def draw(rng: random.Random, rank: int) -> tuple[str, Callable[[Any], Any]]:
    name = rng.choice(list(CALLABLES))
    arguments = CALLABLES[name]()
    each = rng.choice(list(arguments))
    own = rng.choice((tensors, splits, ops))
    value = odd_values.pick(rng) if rng.random() < 0.4 else rng.choice(own())
    if name in ("isend", "irecv") and each in ("dst", "src"):
        value = rng.choice((-1, 2, 1 << 40, "a", 1.5))
    arguments[each] = value
    if rank and name in ("gather", "scatter") and each not in ("gather_list", "scatter_list"):
        arguments[f"{name}_list"] = None

    def run(group: Any) -> Any:
        work = getattr(dist, name)(**arguments, group=group, **IS_ASYNC.get(name, {}))
        # A message has no other end: the group goes away with it.
        return None if work is None or name in ("isend", "irecv") else work.wait()

    return f"dist.{name}({each}={shown(value)[:60]})", run


IS_ASYNC = {name: {"async_op": True} for name in CALLABLES if name not in ("isend", "irecv")}


def name_of(text: str) -> str:
    return text.removeprefix("dist.").partition("(")[0]


def works(rank: int, group: Any) -> str:
    total = torch.tensor([rank + 1.0])
    try:
        dist.all_reduce(total, group=group)
    except Exception as error:
        return f"the next call raised {type(error).__name__}: {str(error)[:200]}"
    return "" if total.item() == 3 else f"the next call returned {total}"


def make_calls(rank: int, n: int, seed: int, notes: Notes) -> list[str]:
    warnings.simplefilter("ignore")  # of torch, about rare kinds of tensors
    wrong = []
    for idx in range(CALLS):
        rng = random.Random(f"{seed} {idx}")
        text, run = draw(rng, rank)
        notes.set(rank, f"rank {rank}, call {idx}: {text}")
        group = dist.new_group(timeout=GROUP)
        ends = torch.zeros(2)  # of returns, and of errors that the backend raised
        try:
            run(group)
            ends[0] += 1
        except Exception as error:
            text += f" {type(error).__name__}"
            ends[1] += isinstance(error, dist.DistBackendError)
        dist.all_reduce(ends)
        complaint = ""
        # If torch refused it on one rank before the backend, the other one waited in vain.
        if ends.tolist() in ([2, 0], [0, 0], [0, 2]) and name_of(text) not in ("isend", "irecv"):
            complaint = works(rank, group)
        complaint = complaint or works(rank, None)
        if complaint:
            wrong.append(f"call {idx}: {text}: {complaint}")
        dist.destroy_process_group(group)
    return wrong


def run_case(seed: int) -> Outcome:
    notes = Notes(RANKS)
    run = functools.partial(run_group, make_calls, RANKS, seed, notes)
    wrong, crash = run_isolated(run, DEADLINE_S)
    if crash:
        return Outcome(f"{crash[-300:]} ({notes})")
    return Outcome("\n    ".join(sorted({text for rank in wrong for text in rank})))
