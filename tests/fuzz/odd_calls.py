"""Calls of the public API with odd arguments: a table of methods, and draws from it."""

from __future__ import annotations

import functools
import operator
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import odd_values

import pycoll
from pycoll import schedule, topology
from pycoll.arguments import shown

Comm = pycoll.Communicator


@dataclass(frozen=True)
class Method:
    """A public method, and arguments with which it works."""

    run: Callable[..., Any]  # (comm, **arguments)
    arguments: Callable[[Comm], dict[str, Any]]
    may_raise: tuple[type[Exception], ...] = ()  # besides UsageError
    breaks: bool = False  # the communicator need not work afterwards
    skips: Callable[[str, Any], bool] = field(default=lambda name, value: False)
    odd: tuple[str, ...] = ()  # arguments that are replaced; empty: all


def is_number(value: Any, least: int, most: int) -> bool:
    """Whether a call may take the value for a whole number between these."""
    if type(value) is odd_values.Resizing or not hasattr(type(value), "__index__"):
        return False
    try:
        return least <= operator.index(value) <= most
    except Exception:
        return False


def rows(comm: Comm) -> np.ndarray:
    return np.ones(4 * comm.size)


COMMON = {"algorithm": None, "async_op": False}
REDUCES = COMMON | {"op": "sum", "deterministic": None}
COLLECTIVES: dict[str, dict[str, Any]] = {
    "all_reduce": REDUCES | {"out": None},
    "reduce": REDUCES | {"root": 0, "out": None},
    "scan": REDUCES | {"out": None},
    "exscan": REDUCES | {"out": None},
    "reduce_scatter": REDUCES | {"out": None, "counts": None},
    "all_gather": COMMON | {"out": None, "counts": None},
    "all_to_all": COMMON | {"out": None, "send_counts": None, "recv_counts": None},
    "broadcast": COMMON | {"root": 0},
    "gather": COMMON | {"root": 0, "out": None},
    "scatter": COMMON | {"root": 0, "out": None},
    "neighbor_exchange": COMMON | {"out": None},
    "barrier": COMMON,
}


def collective(comm: Comm, name: str, **arguments: Any) -> None:
    result = getattr(comm, name)(**arguments)
    if isinstance(result, pycoll.Work):
        result.wait(30)


def of_collective(name: str) -> Method:
    def arguments(comm: Comm) -> dict[str, Any]:
        x = np.ones((2, 3)) if name == "neighbor_exchange" else rows(comm)
        return {**({} if name == "barrier" else {"x": x}), **COLLECTIVES[name]}

    return Method(lambda comm, **a: collective(comm, name, **a), arguments)


def message(comm: Comm, name: str, **arguments: Any) -> None:
    """A message that may have no other end: the communicator is closed soon."""
    work = getattr(comm, name)(**arguments)
    if isinstance(work, pycoll.Work):
        work.wait(0)


def wait(comm: Comm, timeout_s: Any) -> None:
    work = comm.all_reduce(np.ones(3), async_op=True)
    try:
        work.wait(timeout_s)
    finally:
        work.wait(30)


def coalesced(comm: Comm, **arguments: Any) -> None:
    with comm.coalesce():
        comm.all_reduce(np.ones(3))
        comm.all_reduce(**arguments)


def close(made: Any) -> None:
    if isinstance(made, Comm):
        made.close()


def rank_function(comm: Comm) -> int:
    return comm.size


def moves(n: int, root: int, move: Callable[[], Any]) -> Any:
    yield move()


def build_own(comm: Comm, **arguments: Any) -> None:
    """Builds an algorithm whose one move is odd."""
    name = f"odd {comm.rank}"
    chunks = arguments.pop("num_chunks")
    own = functools.partial(moves, move=lambda: schedule.Move(**arguments))
    schedule.register("all_reduce", name, num_chunks=chunks)(own)
    comm.all_reduce(np.ones(4), algorithm=name)


def ring() -> schedule.Schedule:
    return schedule.build("all_reduce", "ring", 4)


def of_schedule(name: str, **arguments: Any) -> Method:
    return Method(lambda comm, **a: getattr(ring(), name)(**a), lambda comm: dict(arguments))


JOIN = {"timeout_s": 0.05}
NO_RANK = (pycoll.TimeoutError, pycoll.SystemError)
METHODS: dict[str, Method] = {name: of_collective(name) for name in COLLECTIVES} | {
    "send": Method(
        lambda comm, **a: message(comm, "send", **a),
        lambda comm: {"x": np.ones(4), "peer": 1 - comm.rank, "tag": 0, "async_op": True},
        (pycoll.TimeoutError,),
        breaks=True,
        odd=("x", "peer", "tag"),
    ),
    "recv": Method(
        lambda comm, **a: message(comm, "recv", **a),
        lambda comm: {"x": np.ones(4), "peer": 1 - comm.rank, "tag": 0, "async_op": True},
        (pycoll.TimeoutError,),
        breaks=True,
        odd=("x", "peer", "tag"),
    ),
    "recv_any": Method(
        lambda comm, **a: comm.recv_any(**a),
        lambda comm: {"x": np.ones(4), "tag": 0},
        breaks=True,
        odd=("tag",),
        skips=lambda name, value: (
            type(value) is odd_values.Resizing or is_number(value, 0, 1 << 64)
        ),
    ),
    "coalesce": Method(coalesced, lambda comm: {"x": rows(comm), "op": "sum", "out": None}),
    "Work.wait": Method(wait, lambda comm: {"timeout_s": 30}, (pycoll.TimeoutError,)),
    "split": Method(lambda comm, **a: close(comm.split(**a)), lambda comm: {"color": 0, "key": 0}),
    "group": Method(lambda comm, **a: close(comm.group(**a)), lambda comm: {"ranks": [0, 1]}),
    "empty": Method(
        lambda comm, **a: comm.empty(**a),
        lambda comm: {"shape": 3, "dtype": "f32", "device": None},
        (pycoll.SystemError,),
    ),
    "register": Method(lambda comm, **a: comm.register(**a), lambda comm: {"x": np.ones(1 << 16)}),
    "unregister": Method(lambda comm, **a: comm.unregister(**a), lambda comm: {"x": np.ones(4)}),
    "explain": Method(
        lambda comm, **a: comm.explain(**a),
        lambda comm: {
            "collective": "all_reduce",
            "nbytes": 8,
            "dtype": None,
            "root": 0,
            "mapped": False,
            "on_device": False,
        },
    ),  # fmt: skip
    "flight_record": Method(
        lambda comm, **a: comm.flight_record(**a), lambda comm: {"all_ranks": False}
    ),
    "message_record": Method(
        lambda comm, **a: comm.message_record(**a), lambda comm: {"all_ranks": False}
    ),
    "abort": Method(lambda comm, **a: comm.abort(**a), lambda comm: {"reason": ""}, breaks=True),
    "register_after": Method(
        lambda comm, value: setattr(comm, "register_after", value), lambda comm: {"value": 8}
    ),
    "deterministic": Method(
        lambda comm, value: setattr(comm, "deterministic", value), lambda comm: {"value": False}
    ),
    "shrink": Method(lambda comm, **a: comm.shrink(**a), lambda comm: {"timeout_s": 0.05}),
    "grow": Method(
        lambda comm, **a: close(comm.grow(**a)),
        lambda comm: {"num_new": 1, "address": "127.0.0.1:1", **JOIN},
        NO_RANK,
        odd=("num_new", "address"),  # a long wait is right for a large timeout_s
    ),
    "join": Method(
        lambda comm, **a: close(pycoll.join(**a)),
        lambda comm: {"address": "127.0.0.1:1", **JOIN},
        NO_RANK,
        odd=("address",),
    ),
    "init": Method(
        lambda comm, **a: close(pycoll.init(**a)),
        lambda comm: {"timeout_s": 5, "deterministic": False, "mpi": None},
    ),
    "run_ranks": Method(
        lambda comm, **a: pycoll.run_ranks(**a),
        lambda comm: {
            "fn": rank_function,
            "n": 1,
            "threads": True,
            "timeout_s": 5,
            "return_errors": False,
        },
        skips=lambda name, value: name == "n" and is_number(value, 3, 256),
    ),  # fmt: skip
    "premul": Method(
        lambda comm, **a: comm.all_reduce(np.ones(3), pycoll.premul(**a)),
        lambda comm: {"factor": 0.5},
    ),
    "schedule.build": Method(
        lambda comm, **a: schedule.build(**a),
        lambda comm: {"collective": "all_reduce", "algorithm": "ring", "n": 4, "root": 0},
    ),
    "schedule.build_hierarchical": Method(
        lambda comm, **a: schedule.build_hierarchical(**a),
        lambda comm: {"collective": "all_reduce", "n": 4, "ranks_per_host": 2, "root": 0},
    ),
    "schedule.algorithms": Method(
        lambda comm, **a: schedule.algorithms(**a), lambda comm: {"collective": "all_reduce"}
    ),
    "schedule.info": Method(
        lambda comm, **a: schedule.info(**a),
        lambda comm: {"collective": "all_reduce", "algorithm": "ring"},
    ),
    "schedule.register": Method(
        build_own,
        lambda comm: {
            "num_chunks": 1,
            "round": 0,
            "kind": "reduce",
            "chunks": (0, 1),
            "src": 0,
            "dst": 1,
        },
    ),  # fmt: skip
    "Schedule.programs": of_schedule("programs", fuse=True, multicast=True, join_blocks=True),
    "Schedule.verify": of_schedule("verify", slots=8, fuse=True),
    "Schedule.min_slots": of_schedule("min_slots", max_slots=8),
    "Schedule.goal": of_schedule("goal", rank=0, chunk=0),
    "Schedule.starts_with_value": of_schedule("starts_with_value", rank=0, chunk=0),
    "Schedule.simulate": of_schedule(
        "simulate", nbytes=64, alpha=1e-6, beta=1e-9, gamma=0.0, slots=8, tile_bytes=None
    ),
    "Schedule.explain": of_schedule("explain", fuse=True, multicast=True),
    "topology.uniform": Method(
        lambda comm, **a: topology.uniform(**a),
        lambda comm: {"num_ranks": 4, "latency_s": 1e-6, "link_bytes_per_s": 1e9},
    ),
    "topology.loads": Method(
        lambda comm, **a: topology.loads(**a), lambda comm: {"text": "", "source": "a text"}
    ),
}


@dataclass(frozen=True)
class OddCall:
    method: Method
    text: str
    run: Callable[[], Any]


def closing(comm: Comm) -> Any:
    """A number that closes the communicator when it is read."""

    def close_and_count() -> int:
        comm.close()
        return 1

    return odd_values.hooked(["__index__", "__bool__"], close_and_count)


def draw(rng: random.Random, comm: Comm) -> OddCall:
    """A call with one odd argument, seldom two; the same on all ranks for one seed."""
    name = rng.choice(list(METHODS))
    method = METHODS[name]
    arguments = method.arguments(comm)
    names = method.odd or tuple(arguments)
    changed = rng.sample(names, min(len(names), rng.choice((1, 1, 1, 1, 2))))
    for each in changed:
        value = odd_values.pick(rng, arguments.get("x"))
        while method.skips(each, value):
            value = odd_values.pick(rng, arguments.get("x"))
        arguments[each] = value
    if rng.random() < 0.03:
        arguments[changed[0]] = closing(comm)
        method = replace(method, breaks=True)
    listed = ", ".join(f"{each}={shown(arguments[each])[:60]}" for each in changed)

    def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return method.run(comm, **arguments)

    return OddCall(method, f"{name}({listed})", run)


def leave_the_job() -> None:
    """Makes later calls of `pycoll.init` in this process make worlds of one rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYCOLL_TOKEN"):
        os.environ.pop(name, None)
