"""Collectives on arrays of a device: the same oracles as those of the host."""

from __future__ import annotations

import numpy as np
import pytest
from cases import INFO, in_turn
from comm_cases import both, builtin_algorithms, inputs
from device_checks import check
from device_ranks import run_ranks

import pycoll
from pycoll import UsageError
from pycoll.arrays.device import DeviceArray
from pycoll.arrays.memory import numpy_dtype
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import is_reduced_alike, roots_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

TIMEOUT_S = 60


@pytest.mark.parametrize(("n", "threads"), [(1, True), (2, False), (3, True)])
def test_every_collective_matches_its_oracle(n, threads):
    def work(comm: pycoll.Communicator) -> list[int]:
        checksums = []
        for name in ORACLES:
            if n == 1 and name == "neighbor_exchange":
                continue
            for rows in (1, 5, 4099):
                for root in roots_of(name, n):
                    checksum = check(comm, name, rows, root)
                    if is_reduced_alike(name):
                        checksums.append(checksum)
        return checksums

    results = run_ranks(work, n, threads=threads, timeout_s=TIMEOUT_S)
    assert all(result == results[0] for result in results)


def test_every_algorithm_named_matches_its_oracle():
    def work(comm: pycoll.Communicator) -> None:
        for protocol in ("simple", "ll", "ll128"):
            for name in ORACLES:
                for algorithm in builtin_algorithms(name):
                    check(comm, name, 777, 0, algorithm=f"{algorithm}/{protocol}")
                    assert comm.flight_record()[-1]["algorithm"] == f"{algorithm}/{protocol}"

    run_ranks(work, 3, threads=True, timeout_s=TIMEOUT_S)


def poison_sums_what_it_may_and_says_what_it_may_not(comm: pycoll.Communicator) -> None:
    for algorithm in ("one_shot", "two_shot"):
        for rows in (1, 5, 777):
            for _ in range(4):  # each of its buffers, and the first one again
                check(comm, "all_reduce", rows, 0, algorithm=f"{algorithm}/poison")
                assert comm.flight_record()[-1]["algorithm"] == f"{algorithm}/poison"
    x = DeviceArray.of(np.ones(8, np.float32))
    big = DeviceArray.of(np.ones(1 << 20, np.float32))
    whole = DeviceArray.of(np.ones(8, np.int32))
    for call, why in (
        (lambda: comm.all_reduce(whole, algorithm="one_shot/poison"), "floating-point"),
        (lambda: comm.all_gather(x, algorithm="ring/poison"), "floating-point"),
        (lambda: comm.all_reduce(x, algorithm="ring/poison"), "two messages to a peer"),
        (lambda: comm.all_reduce(big, algorithm="one_shot/poison"), "one slot for each block"),
    ):
        with pytest.raises(UsageError, match=why):
            call()
    check(comm, "all_reduce", 5, 0)  # no refused call was begun


def uneven_blocks_match_those_of_the_host(comm: pycoll.Communicator) -> None:
    n, me = comm.size, comm.rank
    counts = [3, 0, 1000][:n]
    x = inputs(n, counts[me], np.float32)[me]
    np.testing.assert_array_equal(
        comm.all_gather(DeviceArray.of(x), counts=counts).numpy(),
        comm.all_gather(x, counts=counts),
    )
    x = inputs(n, sum(counts), np.int32)[me]
    np.testing.assert_array_equal(
        comm.reduce_scatter(DeviceArray.of(x), counts=counts).numpy(),
        comm.reduce_scatter(x, counts=counts),
    )
    send = [7 * (me + peer) for peer in range(n)]
    x = inputs(n, sum(send), np.float32)[me]
    for given in ({}, {"recv_counts": [7 * (me + peer) for peer in range(n)]}):
        np.testing.assert_array_equal(
            comm.all_to_all(DeviceArray.of(x), send_counts=send, **given).numpy(),
            comm.all_to_all(x, send_counts=send, **given),
        )


def host_and_device_calls_take_turns(comm: pycoll.Communicator) -> None:
    host, x = np.ones(100), DeviceArray.of(np.ones(100))
    for _ in range(20):
        comm.all_reduce(host, "avg")
        comm.all_reduce(x, "avg")
    handle = comm.all_reduce(host, async_op=True)
    comm.all_reduce(x)
    handle.wait()
    assert (x.numpy() == comm.size).all() and (host == comm.size).all()


def parts_of_a_communicator_have_links_of_their_own(comm: pycoll.Communicator) -> None:
    part = comm.split(comm.rank % 2)
    assert part is not None
    x = DeviceArray.of(np.full(10, comm.rank))
    part.all_reduce(x)
    comm.all_reduce(x, "max")
    assert (x.numpy() == 2).all()  # of 3 ranks: 0 + 2, and 1


def coalesced_calls_all_run(comm: pycoll.Communicator) -> None:
    arrays = [DeviceArray.of(np.full(i, comm.rank)) for i in range(1, 6)]
    with comm.coalesce():
        for x in arrays:
            comm.all_reduce(x)
    assert all((x.numpy() == 3).all() for x in arrays)


@both
def test_calls_of_every_kind_give_what_those_of_the_host_give(threads):
    work = in_turn(
        poison_sums_what_it_may_and_says_what_it_may_not,
        uneven_blocks_match_those_of_the_host,
        host_and_device_calls_take_turns,
        parts_of_a_communicator_have_links_of_their_own,
        coalesced_calls_all_run,
    )
    run_ranks(work, 3, threads=threads, timeout_s=TIMEOUT_S)


def test_rule_for_a_protocol_of_devices_holds_where_it_can(monkeypatch, library):
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:two_shot/poison:0-4k;one_shot/ll128:4k-max")

    def work(comm: pycoll.Communicator) -> list[str]:
        chosen = []
        for dtype, count in (("f4", 16), ("i4", 16), ("f4", 4096)):
            comm.all_reduce(DeviceArray.of(np.ones(count, dtype)))
            chosen.append(comm.flight_record()[-1]["algorithm"])
        text = comm.explain("all_reduce", 64, on_device=True)
        assert f"two_shot/poison over {library}:0" in text and "PYCOLL_ALGO" in text, text
        comm.all_reduce(np.ones(16, np.float32))
        return [*chosen, comm.flight_record()[-1]["algorithm"].split("/")[0]]

    results = run_ranks(work, 2, threads=True, timeout_s=TIMEOUT_S)
    expected = ["two_shot/poison", "two_shot/simple", "one_shot/ll128", "two_shot"]
    assert results == [expected, expected]


DTYPES = [
    "f32", "f64", "f16", "bf16", "f8_e4m3", "f8_e5m2", "i8", "i16", "i32", "i64", "u8",
    "bool", "c64", "c128",
]  # fmt: skip


def test_all_ops_of_every_dtype_give_the_bits_of_the_host():
    pytest.importorskip("ml_dtypes")

    def work(comm: pycoll.Communicator) -> None:
        for dtype in DTYPES:
            for op in ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", pycoll.premul(3)):
                check_op(comm, dtype, op)

    def check_op(comm: pycoll.Communicator, dtype: str, op: str) -> None:
        rng = np.random.default_rng(comm.rank)
        values = rng.integers(0, 2 if dtype == "bool" else 5, 1001).astype(numpy_dtype(dtype))
        host = values.copy()
        try:
            comm.all_reduce(host, op, algorithm="one_shot")
        except UsageError as refused:
            with pytest.raises(UsageError) as also:
                comm.all_reduce(DeviceArray.of(values), op, algorithm="one_shot")
            assert str(also.value) == str(refused)
            return
        x = DeviceArray.of(values)
        out = DeviceArray.empty(1001, values.dtype)
        comm.all_reduce(x, op, out=out, algorithm="one_shot")
        assert out.numpy().tobytes() == host.tobytes(), (dtype, op)
        comm.all_reduce(x, op, algorithm="one_shot")
        assert x.numpy().tobytes() == host.tobytes(), (dtype, op, "in place")

    run_ranks(work, 2, threads=True, timeout_s=TIMEOUT_S)


def test_all_reduce_of_any_length_and_offset_is_exact():
    def work(comm: pycoll.Communicator) -> None:
        for count in (0, 1, 15, 16, 17, 70_001, 1_000_003):
            array = DeviceArray.of(np.full(count + 3, comm.rank, np.float32))
            x = array.part(1, count)
            comm.all_reduce(x)
            got = array.numpy()
            assert (got[1 : count + 1] == sum(range(comm.size))).all(), count
            assert got[0] == got[-1] == comm.rank, count

    run_ranks(work, 2, timeout_s=TIMEOUT_S)


def test_wrong_calls_are_refused_and_say_why():
    def work(comm: pycoll.Communicator) -> None:
        with pytest.raises(UsageError, match="before the first collective"):
            comm.explain("all_reduce", 64, on_device=True)
        x = DeviceArray.of(np.ones(4))
        comm.all_reduce(x)
        assert "blocks of" in comm.explain("all_reduce", 64, on_device=True)
        for protocol in ("ll128", "poison"):
            with pytest.raises(UsageError, match=f"{protocol} is for device arrays only"):
                comm.all_reduce(np.ones(4, np.float32), algorithm=f"one_shot/{protocol}")
        with pytest.raises(UsageError, match="x is on device 0, out is in CPU memory"):
            comm.all_reduce(x, out=np.ones(4))
        with pytest.raises(UsageError, match="does not go with|reduce"):
            comm.all_reduce(DeviceArray.of(np.ones(4)), "band")
        comm.all_reduce(x)
        assert INFO["all_reduce"].name == comm.flight_record()[-1]["collective"]

    run_ranks(work, 2, threads=True, timeout_s=TIMEOUT_S)
