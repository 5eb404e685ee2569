"""deterministic=True: only the values and the order of their ranks decide the bits.

They are those of one sum from rank 0 on in the accumulator's type (f32 for 16-bit floats), rounded
once: whatever the algorithm, the protocol, the size of the message and the collective.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from cases import INFO
from comm_cases import PROTOCOLS, builtin_algorithms
from worlds import Comm, on_ranks, run

from pycoll import CollectiveMismatchError, UsageError, _core, run_ranks, tuning
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import arguments

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

REDUCING = [name for name in ORACLES if INFO[name].has_op]
COUNT = 3000 * 2 * 3 * 4  # elements: blocks for every n, and more than a slot


@functools.cache
def hard_to_add(n: int, count: int, dtype: type) -> np.ndarray:
    """Values of every size, whose sum depends on the order of the additions."""
    rng = np.random.default_rng(n)
    scale = 2.0 ** rng.integers(-8, 8, (n, count))
    return (rng.normal(size=(n, count)) * scale).astype(dtype)


@np.errstate(over="ignore", invalid="ignore")
def canonical(values: np.ndarray, op: str) -> np.ndarray:
    total = values[0].astype(np.float32)
    for value in values[1:]:
        value = value.astype(np.float32)
        total = {"sum": total + value, "avg": total + value, "prod": total * value}[op]
    if op == "avg":
        total /= np.float32(len(values))
    return total.astype(values.dtype)


def expected(name: str, values: np.ndarray, rank: int, op: str) -> np.ndarray | None:
    n = len(values)
    if name == "reduce_scatter":
        return canonical(values, op).reshape(n, -1)[rank]
    if name == "reduce":
        return canonical(values, op) if rank == 1 else None
    if name == "scan":
        return canonical(values[: rank + 1], op)
    if name == "exscan":
        return canonical(values[:rank], op) if rank > 0 else None
    return canonical(values, op)


def call(comm: Comm, name: str, x: Any, op: str = "sum", **options: Any) -> Any:
    """Out of place, so that x can be used again."""
    like = x[: len(x) // comm.size] if name == "reduce_scatter" else x
    return getattr(comm, name)(x, out=np.zeros_like(like), **arguments(name, 1, op), **options)


def is_refused(comm: Comm, name: str, algorithm: str) -> bool:
    """Whether the algorithm says that it cannot be deterministic."""
    x = np.ones(comm.size, np.float16)
    try:
        call(comm, name, x, algorithm=algorithm, deterministic=True)
    except UsageError as error:
        assert "deterministic" in str(error), error
        return True
    return False


def every_choice(comm: Comm, dtype: type) -> dict[str, list[str]]:
    n, rank = comm.size, comm.rank
    allowed: dict[str, list[str]] = {}
    for name in REDUCING:
        allowed[name] = [a for a in builtin_algorithms(name) if not is_refused(comm, name, a)]
        for op in ("sum", "prod", "avg") if name not in ("scan", "exscan") else ("sum", "prod"):
            for count in (n, 7 * n, COUNT):
                with np.errstate(over="ignore", invalid="ignore"):
                    values = hard_to_add(n, COUNT, dtype)[:, :count]
                    right = expected(name, values, rank, op)
                for algorithm in [None, *(f"{a}/{p}" for a in allowed[name] for p in PROTOCOLS)]:
                    x = values[rank].copy()
                    result = call(comm, name, x, op, algorithm=algorithm, deterministic=True)
                    if right is not None:
                        assert result.tobytes() == right.tobytes(), (name, op, count, algorithm)
    return allowed


def test_deterministic_bits_are_identical_for_every_algorithm_protocol_and_size():
    for n, dtype, kind in [
        (2, np.float32, "processes"),
        (3, np.float16, "threads"),
        (4, np.float32, "threads"),
        (5, np.float16, "processes"),
        (8, np.float32, "threads"),
    ]:
        first, *others = run(every_choice, n, dtype, kind=kind)
        assert all(other == first for other in others)
        assert all(first.values()), f"no deterministic algorithm of some collective: {first}"
        if n > 2:
            assert "ring" not in first["all_reduce"], "each block's sum starts at another rank"


@on_ranks(threads=[4])
def test_deterministic_of_the_communicator_is_the_default_of_its_calls(comm):
    x = np.ones(10, np.float16)
    comm.all_reduce(x, algorithm="ring")
    comm.deterministic = True
    with pytest.raises(UsageError, match="deterministic"):
        comm.all_reduce(x, algorithm="ring")
    comm.all_reduce(x, algorithm="ring", deterministic=False)
    comm.all_gather(x, algorithm="ring")  # moves bits and adds none
    comm.barrier()


@pytest.mark.torch
@on_ranks(threads=[5], needs="torch")
def test_deterministic_bf16_is_rounded_once(comm):
    import torch

    for count in (1, 1000, 100_000):
        values = torch.from_numpy(hard_to_add(comm.size, count, np.float32)).bfloat16()
        right = torch.from_numpy(canonical(values.float().numpy(), "sum")).bfloat16()
        for algorithm in [None, *builtin_algorithms("all_reduce")]:
            x = values[comm.rank].clone()
            try:
                comm.all_reduce(x, algorithm=algorithm, deterministic=True)
            except UsageError:
                assert algorithm is not None
                continue
            assert torch.equal(x.view(torch.int16), right.view(torch.int16)), algorithm


@pytest.mark.parametrize(("by", "dtype"), [("table", np.float32), ("rule", np.float16)])
def test_deterministic_bits_do_not_depend_on_what_is_preferred(by, dtype, monkeypatch, tmp_path):
    """A measured table or a rule prefers an algorithm: the one that runs has the same bits."""
    monkeypatch.setenv("PYCOLL_CACHE_DIR", str(tmp_path))
    n, count = 4, 4 * 3000
    values = hard_to_add(n, count, dtype)
    nbytes = values[0].nbytes
    cores = _core.build_info()["cores"]

    def prefer(name: str, choice: str) -> None:
        if by == "rule":
            monkeypatch.setenv("PYCOLL_ALGO", f"{name}:{choice}")
            return
        row = _core.TunedSize(name, n, cores, "mapped", nbytes, tuning.today(), {choice: 1e-9})
        tuning.path().unlink(missing_ok=True)
        tuning.save([], [row])

    def work(comm: Comm, name: str) -> str:
        right = expected(name, values, comm.rank, "sum")
        for _ in range(2):
            result = call(comm, name, values[comm.rank].copy(), deterministic=True)
            if right is not None:
                assert result.tobytes() == right.tobytes(), name
        return comm.flight_record()[-1]["algorithm"]

    for name in REDUCING:
        ran = {}
        for choice in _core.choices(name, nbytes):
            prefer(name, choice)
            ran[choice] = run_ranks(work, n, name, threads=True)[0]
        assert any(choice == got for choice, got in ran.items()), "nothing was as preferred"
        if name == "all_reduce":
            assert ran["ring/simple"] != "ring/simple", "a ring starts at another rank each time"


@on_ranks(threads=[3])
def test_deterministic_on_some_ranks_only_is_a_mismatch(comm):
    with pytest.raises(CollectiveMismatchError, match="deterministic"):
        comm.all_reduce(np.ones(100), deterministic=comm.rank == 1)
        comm.barrier()
