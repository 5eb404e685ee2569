"""Every collective with every algorithm, protocol, number of ranks, size and root equals NumPy."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from cases import INFO
from comm_cases import PROTOCOLS, builtin_algorithms, crc, inputs
from worlds import Comm, on_ranks, run

import pycoll
from pycoll import UsageError
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import arguments, roots_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

SLOT_BYTES = 128 << 10
ODD = 4099


def test_collectives_all_have_an_oracle_and_an_algorithm() -> None:
    assert set(ORACLES) == set(INFO) - {"barrier"}
    for name in ORACLES:
        assert builtin_algorithms(name), name


def values_of(name: str, n: int, rows: int, row: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    """The f32 inputs of all ranks for blocks of so many rows."""
    shape = (*ORACLES[name].leading(n, rows), *row)
    return inputs(n, int(np.prod(shape)), seed=seed).reshape(n, *shape)


def check(name: str, values: np.ndarray, rank: int, root: int, result: Any, case: object) -> None:
    """The result of `op=sum` on this rank."""
    expected = ORACLES[name].expected(values, rank, root, "sum")
    if expected is None:
        assert result is None or name == "exscan", case
        return
    assert result.shape == expected.shape, case
    if not INFO[name].has_op:
        assert result.tobytes() == expected.tobytes(), case
        return
    # Each of the n - 1 additions rounds by at most half a unit of the partial sum.
    bound = ORACLES[name].expected(np.abs(values).astype(np.float64), rank, root, "sum")
    error = np.abs(result - expected)
    assert (error <= len(values) * np.finfo(np.float32).eps * bound).all(), case


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def named(name: str) -> list[str]:
    return [f"{algorithm}/{p}" for algorithm in builtin_algorithms(name) for p in PROTOCOLS]


@on_ranks(2, 3, processes=[1, 5], threads=[4, 8])
def test_collective_of_every_algorithm_protocol_size_and_root_equals_numpy(comm):
    n, rank = comm.size, comm.rank
    for name in ORACLES:
        larger_than_a_slot = SLOT_BYTES // 4 + 5
        for rows in sorted({0, 1, n + 1, ODD, larger_than_a_slot}):
            values = values_of(name, n, rows)
            last = n - 1 if INFO[name].has_root else 0
            for root in roots_of(name, n) if rows <= ODD else [last]:
                for algorithm in named(name):
                    case = (name, n, rows, root, algorithm)
                    x = values[rank].copy()
                    result = getattr(comm, name)(x, **arguments(name, root), algorithm=algorithm)
                    check(name, values, rank, root, result, case)
                    if ORACLES[name].in_place:
                        assert result is None or result is x, case
                    else:
                        assert (x == values[rank]).all(), case
    bits = [
        crc(comm.all_reduce(values_of("all_reduce", n, ODD)[rank].copy(), algorithm=algorithm))
        for algorithm in named("all_reduce")
    ]
    everywhere = comm.all_gather(np.array(bits))
    assert (everywhere.reshape(n, -1) == bits).all(), "the bits of ranks differ"


def results_of_all(comm, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    comm.barrier()
    return {
        name: getattr(comm, name)(of_ranks[comm.rank].copy(), **arguments(name, 33))
        for name, of_ranks in values.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_every_collective_of_66_ranks_equals_numpy():
    """20 s. Ranks only communicate: what one computes would wait for 65 that spin."""
    n, values = 66, {}
    for name, oracle in ORACLES.items():
        shape = oracle.leading(n, 3)
        values[name] = inputs(n, int(np.prod(shape)), np.int64).reshape(n, *shape)
    results = pycoll.run_ranks(results_of_all, n, values, timeout_s=150)
    for name, oracle in ORACLES.items():
        for rank, of_rank in enumerate(results):
            expected = oracle.expected(values[name], rank, 33, "sum")
            assert expected is None or (of_rank[name] == expected).all(), (name, rank)


@on_ranks(threads=[96], own=True)
def test_algorithm_with_too_many_peers_is_refused_in_words(comm):
    with pytest.raises(UsageError, match="would have 95 peers; at most 64 are possible"):
        comm.all_reduce(np.ones(10), algorithm="one_shot")


def expected_out(name: str, values: np.ndarray, rank: int, root: int) -> np.ndarray | None:
    """An array for the result, filled with what must not be there afterwards."""
    like = ORACLES[name].expected(values, rank, root, "sum")
    if like is None and name == "exscan":
        like = values[rank]
    return None if like is None else np.full(like.shape, np.nan, values.dtype)


@on_ranks(processes=[2], threads=[3])
def test_collective_with_an_out_leaves_x_and_returns_out(comm):
    n, rank = comm.size, comm.rank
    for name in sorted(set(ORACLES) - {"broadcast"}):  # which has no out
        for rows, row in [(1, ()), (7, (3, 2)), (SLOT_BYTES // 8, (3,))]:
            values = values_of(name, n, rows, row)
            for root in roots_of(name, n):
                for algorithm in [None, *named(name)]:
                    x = read_only(values[rank])
                    out = expected_out(name, values, rank, root)
                    options = arguments(name, root)
                    result = getattr(comm, name)(x, out=out, algorithm=algorithm, **options)
                    assert result is out, (name, algorithm)
                    check(name, values, rank, root, result, (name, rows, row, root, algorithm))


def misaligned(x: np.ndarray) -> tuple[np.ndarray, bytearray]:
    """A copy of x one byte off, and the memory around it."""
    memory = bytearray(x.nbytes + 2)
    view = np.frombuffer(memory, x.dtype, x.size, offset=1).reshape(x.shape)
    view[...] = x
    return view, memory


@on_ranks(threads=[3])
def test_collective_with_misaligned_arrays_touches_nothing_beside_them(comm):
    n, rank, root = comm.size, comm.rank, 1
    for name in ORACLES:
        for rows in (1, 1000, 40_001):
            values = values_of(name, n, rows)
            for algorithm in named(name):
                case = (name, rows, algorithm)
                options = {**arguments(name, root), "algorithm": algorithm}
                x, around_x = misaligned(values[rank])
                result = getattr(comm, name)(x, **options)
                check(name, values, rank, root, result, case)
                assert (around_x[0], around_x[-1]) == (0, 0), case
                if name == "broadcast":
                    continue
                x[...] = values[rank]
                like = expected_out(name, values, rank, root)
                out, around_out = (None, b"00") if like is None else misaligned(like)
                assert getattr(comm, name)(x, out=out, **options) is out, case
                check(name, values, rank, root, out, case)
                assert around_out[0] == around_out[-1], case


@on_ranks(processes=[2, 5], threads=[1, 4])
def test_collective_with_its_own_block_in_place_equals_numpy(comm):
    """NCCL's in-place calls: out is this rank's block of x, or x this rank's block of out."""
    n, rank = comm.size, comm.rank
    for rows in (0, 7, SLOT_BYTES // 4 + 5):
        mine = slice(rank * rows, (rank + 1) * rows)
        values = values_of("reduce_scatter", n, rows)
        for algorithm in [None, *named("reduce_scatter")]:
            x = values[rank].copy()
            out = comm.reduce_scatter(x, out=x[mine], algorithm=algorithm)
            check("reduce_scatter", values, rank, 0, out, (rows, algorithm))
        values = values_of("all_gather", n, rows)
        for algorithm in [None, *named("all_gather")]:
            out = np.full(n * rows, np.nan, np.float32)
            out[mine] = values[rank]
            assert comm.all_gather(out[mine], out, algorithm=algorithm) is out
            check("all_gather", values, rank, 0, out, (rows, algorithm))


@on_ranks(processes=[2], threads=[4])
def test_collective_async_all_at_once_equal_numpy(comm):
    n, rank = comm.size, comm.rank
    queued = []
    for rows in (3, ODD):
        for name in ORACLES:
            values = values_of(name, n, rows, seed=rows)
            for root in roots_of(name, n):
                # No other reference keeps the array.
                x = values[rank].copy()
                started = getattr(comm, name)(x, async_op=True, **arguments(name, root))
                del x
                assert isinstance(started, pycoll.Work)
                queued.append((started, name, values, root))
            queued.append((comm.barrier(async_op=True), "barrier", None, 0))
    for started, name, values, root in queued:
        result = started.wait()
        assert started.done() and started.exception() is None
        if name == "barrier":
            assert result is None
        else:
            check(name, values, rank, root, result, name)


@on_ranks(threads=[3])
def test_collective_of_zero_dimensional_arrays_gathers_to_one_axis(comm):
    x = np.array(comm.rank + 1.5)
    everything = np.arange(comm.size) + 1.5
    np.testing.assert_array_equal(comm.all_gather(x), everything)
    gathered = comm.gather(x, root=1)
    assert (gathered is None) == (comm.rank != 1)
    assert gathered is None or (gathered == everything).all()
    out = np.zeros((comm.size, 1))
    assert comm.all_gather(x, out) is out
    np.testing.assert_array_equal(out[:, 0], everything)
    assert comm.scan(x.copy()) == everything[: comm.rank + 1].sum()
    reduced = comm.reduce(x.copy(), 2, "max")
    assert reduced == comm.size + 0.5 if comm.rank == 2 else reduced is None


@on_ranks(threads=[2])
def test_collective_keeps_many_axes(comm):
    x = np.full((4, 1, 2, 1, 3, 1, 2, 1), comm.rank, np.float32)
    assert comm.all_gather(x).shape == (8, *x.shape[1:])
    assert comm.reduce_scatter(x).shape == (2, *x.shape[1:])
    assert comm.all_to_all(x).shape == x.shape
    assert comm.scatter(x, root=1).shape == (2, *x.shape[1:])
    gathered = comm.all_gather(x, np.zeros((2, *x.shape), np.float32))
    assert (gathered[1] == 1).all() and (gathered[0] == 0).all()


@on_ranks(threads=[3])
def test_scatter_needs_on_other_ranks_only_out_or_an_array_like_the_roots(comm):
    x = np.arange(12.0).reshape(6, 2)
    mine = x.reshape(3, 2, 2)[comm.rank]
    at_root = comm.rank == 2
    out = np.zeros((2, 2))
    assert comm.scatter(x if at_root else None, 2, out) is out
    np.testing.assert_array_equal(out, mine)
    out = np.zeros(4)  # of another shape
    comm.scatter(x, 2, out)
    np.testing.assert_array_equal(out, mine.reshape(-1))
    result = comm.scatter(x if at_root else np.full_like(x, np.nan), root=2)
    np.testing.assert_array_equal(result, mine)


@pytest.mark.torch
@on_ranks(2, needs="torch")
def test_collective_results_are_of_the_library_of_x(comm):
    import torch

    n, rank = comm.size, comm.rank
    for name in ORACLES:
        values = values_of(name, n, 5, (2,))
        x = torch.from_numpy(values[rank].copy())
        result = getattr(comm, name)(x, **arguments(name, 0))
        assert result is None or type(result) is torch.Tensor, name
        check(name, values, rank, 0, None if result is None else result.numpy(), name)
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank), dtype=torch.bfloat16))
    gathered = comm.all_gather(parameter)
    assert gathered.dtype == torch.bfloat16 and not gathered.requires_grad
    assert gathered[:, 0].tolist() == [r for r in range(n) for _ in range(2)]
    buffer = memoryview(bytearray([rank, rank])).cast("B")
    assert comm.all_gather(buffer).tolist() == [r for r in range(n) for _ in range(2)]
    assert comm.all_gather(bytearray([rank])).dtype == np.uint8


# --- barrier ---

NUM_BARRIERS = 30


def enter_at_random_times(comm: Comm, seed: int) -> list[tuple[float, float]]:
    delays = random.Random(seed * 100 + comm.rank)
    times = []
    for _ in range(NUM_BARRIERS):
        time.sleep(delays.choice([0.0, 0.0, 0.001, 0.005]))
        entered = time.monotonic()  # the same clock in all processes of a host
        comm.barrier()
        times.append((entered, time.monotonic()))
    return times


def test_barrier_no_rank_leaves_before_the_last_has_entered():
    for kind, sizes in {"processes": (1, 2, 3, 5, 8), "threads": (2, 4, 8)}.items():
        for n in sizes:
            seed = random.randrange(1 << 30)
            times = run(enter_at_random_times, n, seed, kind=kind)
            for i in range(NUM_BARRIERS):
                last_entry = max(rank_times[i][0] for rank_times in times)
                first_exit = min(rank_times[i][1] for rank_times in times)
                assert first_exit >= last_entry, f"barrier {i} of {n} {kind} with seed {seed}"


@on_ranks(3)
def test_barrier_between_other_collectives_keeps_their_order(comm):
    for i in range(50):
        x = np.full(7, comm.rank + i)
        comm.all_reduce(x)
        comm.barrier()
        y = np.full(3, comm.rank)
        comm.broadcast(y, root=i % comm.size)
        assert (x == 3 + 3 * i).all()
        assert (y == i % comm.size).all()
