"""Every algorithm and protocol at the edges of tiles, every dtype and op: right on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from comm_cases import (
    OPS,
    PROTOCOLS,
    builtin_algorithms,
    crc,
    inputs,
    slot_payload_bytes,
    tile_count,
)
from worlds import Comm, on_ranks, run

from pycoll.bench.arithmetic import reduced

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

MIB = 1 << 20
MAX_COUNT = MIB // 2  # elements: the largest tile of 4-byte elements fits with room to spare
ODD = 4099
WORLDS = [(2, "processes"), (3, "processes"), (2, "threads"), (5, "threads"), (8, "threads")]


def assert_same_on_all_ranks(outcomes: list[dict]) -> None:
    for rank, outcome in enumerate(outcomes):
        differing = [case for case in outcome if outcome[case] != outcomes[0][case]]
        assert not differing, f"bits of ranks 0 and {rank} differ: {differing}"
    assert len(outcomes[0]) > 0


def all_reduce_cases(
    comm: Comm, payload_bytes: dict[str, int]
) -> tuple[dict, dict[str, list[int]]]:
    """Checksums of every case, and the numbers of messages that this rank sent.

    They are those for one element less than a tile, a tile, and one element more.
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
            for count in sorted({0, n - 1, n, n + 1, tile - 1, tile, tile + 1}):
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


@pytest.mark.slow
def test_all_reduce_at_the_edges_of_a_tile_equals_the_oracle_on_all_ranks():
    payload_bytes = {protocol: slot_payload_bytes(protocol) for protocol in PROTOCOLS}
    for n, kind in WORLDS:
        outcomes = run(all_reduce_cases, n, payload_bytes, kind=kind)
        assert_same_on_all_ranks([bits for bits, _ in outcomes])
        for name in outcomes[0][1]:  # the sizes tried are where a second tile begins
            less, exact, more = np.sum([messages[name] for _, messages in outcomes], axis=0)
            assert less == exact < more, f"{name} on {n} {kind}: not the edge of a tile"


def broadcast_cases(comm: Comm, payload_bytes: dict[str, int]) -> dict:
    n, rank = comm.size, comm.rank
    bits = {}
    for algorithm in builtin_algorithms("broadcast"):
        for protocol in PROTOCOLS:
            tile = payload_bytes[protocol]
            for count in (0, n, tile - 1, tile, tile + 1):
                values = inputs(n, count, np.uint8)
                for root in {0, 1, n - 1}:
                    x = values[rank].copy()
                    assert comm.broadcast(x, root, algorithm=f"{algorithm}/{protocol}") is x
                    assert (x == values[root]).all(), (algorithm, protocol, count, root)
                    bits[algorithm, protocol, count, root] = crc(x)
    return bits


def test_broadcast_at_the_edges_of_a_tile_gives_all_ranks_the_roots_bits():
    payload_bytes = {protocol: slot_payload_bytes(protocol) for protocol in PROTOCOLS}
    for n, kind in WORLDS:
        assert_same_on_all_ranks(run(broadcast_cases, n, payload_bytes, kind=kind))


DTYPES = (np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8)
# Largest error of a reduction of values in -1..1 relative to the sum of their sizes, per rank.
ROUNDING = {np.float32: 2.0**-23, np.float64: 2.0**-52, np.float16: 2.0**-10}
NAMES = ("ring/simple", "tree/ll", "one_shot/ll", "two_shot/simple", None)
COUNTS = (1, 1031, 40_001)


def pairs(*lists: Iterable) -> list[tuple]:
    """Rows that hold each dtype with each op, and take algorithms and counts in turn."""
    dtypes, ops, names, counts = map(list, lists)
    rows = []
    for i, dtype in enumerate(dtypes):
        for j, op in enumerate(ops):
            for k, count in enumerate(counts):
                rows.append((dtype, op, names[(i + j + 2 * k) % len(names)], count))
    return rows


def dtype_and_op_cases(comm: Comm) -> dict:
    n, rank = comm.size, comm.rank
    bits = {}
    for dtype, op, algorithm, count in pairs(DTYPES, OPS, NAMES, COUNTS):
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


def test_all_reduce_of_every_dtype_and_op_equals_the_oracle():
    for n, kind in [(2, "processes"), (3, "processes"), (3, "threads")]:
        assert_same_on_all_ranks(run(dtype_and_op_cases, n, kind=kind))


@pytest.mark.torch
@on_ranks(threads=[3], needs="torch")
def test_all_reduce_of_bf16_and_every_op_equals_the_oracle(comm):
    import torch

    for _, op, algorithm, count in pairs(["bf16"], OPS, NAMES, COUNTS):
        values = torch.from_numpy(inputs(comm.size, count)).to(torch.bfloat16)
        x = values[comm.rank].clone()
        comm.all_reduce(x, op, algorithm=algorithm)
        exact = values.to(torch.float64).numpy()
        bound = comm.size * 2.0**-7 * np.abs(exact).sum(axis=0)
        if op in ("min", "max"):
            bound = np.zeros(count)
        error = np.abs(x.to(torch.float64).numpy() - reduced(exact, op))
        assert (error <= bound).all(), (op, algorithm, count)
        bits = comm.all_gather(x.view(torch.int16))
        assert (bits.view(comm.size, -1) == bits[:count]).all(), (op, algorithm, count)
