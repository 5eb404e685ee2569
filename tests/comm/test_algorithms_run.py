"""Every algorithm, protocol, number of ranks and size edge: right, and the same bits everywhere."""

from __future__ import annotations

import time

import numpy as np
import pytest
from comm_cases import (
    OPS,
    PROTOCOLS,
    both,
    builtin_algorithms,
    crc,
    inputs,
    reduced,
    slot_payload_bytes,
    tile_count,
)

import pycoll
from pycoll import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

MIB = 1 << 20
MAX_COUNT = MIB // 2  # elements: the largest tile of 4-byte elements fits with room to spare
ODD = 4099
each_world = pytest.mark.parametrize("n", range(1, 9))


def assert_same_on_all_ranks(outcomes: list[dict]) -> None:
    for rank, outcome in enumerate(outcomes):
        differing = [case for case in outcome if outcome[case] != outcomes[0][case]]
        assert not differing, f"bits of ranks 0 and {rank} differ: {differing}"
    assert len(outcomes[0]) > 0


def all_reduce_cases(
    comm: pycoll.Communicator, payload_bytes: dict[str, int]
) -> tuple[dict, dict[str, list[int]]]:
    """Runs all cases in one world: rank processes are started once, not once a case.

    Returns the checksums of every case, and how many messages this rank sent for one element less
    than a tile, a tile, and one more.
    """
    n, rank = comm.size, comm.rank
    floats, ints = inputs(n, MAX_COUNT), inputs(n, MAX_COUNT, np.int32)
    float_sum, int_sum = reduced(floats, "sum"), reduced(ints, "sum")
    # Each of the n - 1 additions rounds by at most half a unit of the partial sum.
    bound = n * np.finfo(np.float32).eps * np.abs(floats).sum(axis=0, dtype=np.float64)
    bits, messages = {}, {}
    for algorithm in builtin_algorithms("all_reduce"):
        for protocol in PROTOCOLS:
            name = f"{algorithm}/{protocol}"
            tile = tile_count(algorithm, n, 4, payload_bytes[protocol])
            assert 1 < tile < MAX_COUNT
            sent = {}
            for count in sorted({0, 1, n - 1, n, n + 1, ODD, tile - 1, tile, tile + 1, MIB // 4}):
                x = floats[rank, :count].copy()
                before = comm.ledger["sent_messages"]
                comm.all_reduce(x, algorithm=name)
                sent[count] = comm.ledger["sent_messages"] - before
                assert (np.abs(x - float_sum[:count]) <= bound[:count]).all(), (name, n, count)

                out = np.empty(count, np.int32)
                comm.all_reduce(ints[rank, :count], "sum", out, algorithm=name)
                assert (out == int_sum[:count]).all(), (name, n, count)
                bits[name, count] = (crc(x), crc(out))
            messages[name] = [sent[tile + more] for more in (-1, 0, 1)]
    return bits, messages


@both
@each_world
def test_all_reduce_every_algorithm_protocol_and_size_equals_oracle_on_all_ranks(n, threads):
    payload_bytes = {protocol: slot_payload_bytes(protocol) for protocol in PROTOCOLS}
    outcomes = run_ranks(all_reduce_cases, n, payload_bytes, threads=threads)
    assert_same_on_all_ranks([bits for bits, _ in outcomes])
    if n == 1:
        return
    for name in outcomes[0][1]:  # the sizes tried are where a second tile begins
        less, exact, more = np.sum([messages[name] for _, messages in outcomes], axis=0)
        assert less == exact < more, f"{name}: not the edge of a tile"


def broadcast_cases(comm: pycoll.Communicator, payload_bytes: dict[str, int]) -> dict:
    n, rank = comm.size, comm.rank
    bits = {}
    for algorithm in builtin_algorithms("broadcast"):
        for protocol in PROTOCOLS:
            tile = payload_bytes[protocol]
            for count in (0, 1, n, ODD, tile - 1, tile, tile + 1):
                values = inputs(n, count, np.uint8)
                for root in range(n):
                    x = values[rank].copy()
                    assert comm.broadcast(x, root, algorithm=f"{algorithm}/{protocol}") is x
                    assert (x == values[root]).all(), (algorithm, protocol, count, root)
                    bits[algorithm, protocol, count, root] = crc(x)
    return bits


@both
@each_world
def test_broadcast_every_algorithm_protocol_size_and_root_gives_all_the_roots_bits(n, threads):
    payload_bytes = {protocol: slot_payload_bytes(protocol) for protocol in PROTOCOLS}
    assert_same_on_all_ranks(run_ranks(broadcast_cases, n, payload_bytes, threads=threads))


DTYPES = (np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8)
# Largest error of a reduction of values in -1..1 relative to the sum of their sizes, per rank.
ROUNDING = {np.float32: 2.0**-23, np.float64: 2.0**-52, np.float16: 2.0**-10}


def dtype_and_op_cases(comm: pycoll.Communicator) -> dict:
    n, rank = comm.size, comm.rank
    bits = {}
    for dtype in DTYPES:
        for op in OPS:
            for algorithm in ("ring/simple", "tree/ll", "one_shot/ll", "two_shot/simple", None):
                for count in (1, 1031, 40_001):
                    values = inputs(n, count, dtype)
                    x = values[rank].copy()
                    comm.all_reduce(x, op, algorithm=algorithm)
                    expected = reduced(values, op)
                    case = (np.dtype(dtype).name, op, algorithm, count)
                    if dtype in ROUNDING and op not in ("min", "max"):
                        bound = n * ROUNDING[dtype] * np.abs(values.astype(np.float64)).sum(axis=0)
                        assert (np.abs(x - expected) <= bound).all(), case
                    else:
                        assert (x == expected).all(), case
                    bits[case] = crc(x)
    return bits


@both
@pytest.mark.parametrize("n", [2, 3])
def test_all_reduce_every_dtype_and_op_equals_oracle(n, threads):
    assert_same_on_all_ranks(run_ranks(dtype_and_op_cases, n, threads=threads))


@pytest.mark.torch
@both
def test_all_reduce_bf16_every_op_equals_oracle(threads):
    torch = pytest.importorskip("torch", reason="bf16 needs torch")

    def cases(comm: pycoll.Communicator) -> dict:
        bits = {}
        for op in OPS:
            for algorithm in ("ring/simple", "one_shot/ll", None):
                for count in (1, 1031, 40_001):
                    values = torch.from_numpy(inputs(comm.size, count)).to(torch.bfloat16)
                    x = values[comm.rank].clone()
                    comm.all_reduce(x, op, algorithm=algorithm)
                    exact = values.to(torch.float64).numpy()
                    bound = comm.size * 2.0**-7 * np.abs(exact).sum(axis=0)
                    if op in ("min", "max"):
                        bound = np.zeros(count)
                    error = np.abs(x.to(torch.float64).numpy() - reduced(exact, op))
                    assert (error <= bound).all(), (op, algorithm, count)
                    bits[op, algorithm, count] = crc(x.view(torch.int16).numpy())
        return bits

    assert_same_on_all_ranks(run_ranks(cases, 3, threads=threads))


def random_calls(comm: pycoll.Communicator, seed: int, seconds: float) -> None:
    """The same random calls on all ranks, blocking and queued, in the world and in parts of it."""
    n = comm.size
    rng = np.random.default_rng(seed)
    comms = [comm]
    end = time.monotonic() + seconds
    while True:
        go_on = np.array([time.monotonic() < end], np.uint8)
        comm.all_reduce(go_on, "min")
        if not go_on[0]:
            return
        if rng.random() < 0.02:
            for part in comms[1:]:
                part.close()
            comms = [comm, comm.split(0, key=int(rng.integers(-9, 9)) * comm.rank)]
        chosen = comms[rng.integers(len(comms))]
        queued = []
        for _ in range(rng.integers(1, 6)):
            count = int(2 ** rng.uniform(0, 18))
            values = rng.integers(-99, 99, (n, count)).astype(DTYPES[rng.integers(1, 5)])
            op = ("sum", "min", "max")[rng.integers(3)]
            algorithm = rng.choice([None, *builtin_algorithms("all_reduce")])
            x = values[chosen.rank].copy()
            work = chosen.all_reduce(x, op, algorithm=algorithm, async_op=bool(rng.integers(2)))
            queued.append((work, x, reduced(values, op), (seed, algorithm, op, x.dtype, count)))
        for work, x, expected, case in queued:
            if work is not x:
                work.wait()
            assert (x == expected).all(), case


@pytest.mark.slow
@both
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_all_reduce_random_sequences_stay_right(n, threads):
    seed = int(np.random.default_rng().integers(1 << 30))
    print(f"seed {seed}")
    run_ranks(random_calls, n, seed, 15.0, threads=threads)
