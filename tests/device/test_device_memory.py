"""How ranks reach each other's device memory, registered arrays, and what is left behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import in_turn
from comm_cases import both, inputs
from device_ranks import run_ranks
from processes import shared_memory_files

import pycoll
from pycoll import CollectiveMismatchError, CudaError, UsageError, _core
from pycoll.arrays.device import DeviceArray, device_number

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

TIMEOUT_S = 60
UNREACHED = {"PYCOLL_DEVICE_THREADS_COUNT": "3", "PYCOLL_DEVICE_THREADS_REACH": "0"}


@pytest.mark.parametrize(
    ("setting", "threads"),
    [
        ({"PYCOLL_DEVICE_LINKS": "cpu"}, False),
        ({"PYCOLL_DEVICE_LINKS": "cpu"}, True),
        ({"PYCOLL_DEVICE_THREADS_EXPORT": "0"}, False),
        ({"PYCOLL_DEVICE_THREADS_COUNT": "3"}, False),
        (UNREACHED, False),
        (UNREACHED, True),
    ],
    ids=str,
)
def test_links_are_made_in_every_set_up(emulated, monkeypatch, setting, threads):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)

    def work(comm: pycoll.Communicator) -> None:
        several = "PYCOLL_DEVICE_THREADS_COUNT" in setting
        x = DeviceArray.of(np.full(10_000, comm.rank), device=comm.rank if several else 0)
        comm.all_reduce(x)
        assert (x.numpy() == sum(range(comm.size))).all()

    run_ranks(work, 3, threads=threads, timeout_s=TIMEOUT_S)


def test_one_rank_that_wants_host_links_decides_for_all(emulated):
    def work(comm: pycoll.Communicator) -> None:
        if comm.rank == 1:
            os.environ["PYCOLL_DEVICE_LINKS"] = "cpu"
        for count in (3, 5000, 200_000):
            values = inputs(comm.size, count)
            x = DeviceArray.of(values[comm.rank])
            comm.all_reduce(x)
            np.testing.assert_allclose(x.numpy(), values.sum(0), rtol=1e-5, atol=1e-6)

    run_ranks(work, 3, timeout_s=TIMEOUT_S)


def was_direct(comm: pycoll.Communicator, call: int = -1) -> bool:
    return comm.flight_record()[call]["algorithm"].endswith("/direct")


def launches_together(comm: pycoll.Communicator) -> bool:
    """Whether one launch has the parts of all ranks: threads that share a device."""
    return "accessed in place" in comm.explain("all_reduce", 64, on_device=True)


def direct_without_registered_arrays_needs_a_common_launch(comm: pycoll.Communicator) -> None:
    values = inputs(comm.size, 5000)
    x = DeviceArray.of(values[comm.rank])
    comm.all_reduce(x, algorithm="two_shot/simple")
    again = DeviceArray.of(values[comm.rank])
    if launches_together(comm):
        comm.all_reduce(again, algorithm="two_shot/direct")
        assert again.numpy().tobytes() == x.numpy().tobytes()
    else:
        with pytest.raises(UsageError, match=r"comm.empty\(device=...\)"):
            comm.all_reduce(again, algorithm="two_shot/direct")
    comm.all_reduce(x)


def ranks_in_place_and_not_in_place_agree(comm: pycoll.Communicator) -> None:
    """No rank knows before the launch whether the others' inputs are their outputs."""
    for count in (5, 90_001):
        values = inputs(comm.size, count)
        x = DeviceArray.of(values[comm.rank])
        expected = DeviceArray.empty(count)
        comm.all_reduce(x, algorithm="two_shot/simple", out=expected)
        out = x if comm.rank == 1 else DeviceArray.empty(count)
        comm.all_reduce(x, out=out)
        assert out.numpy().tobytes() == expected.numpy().tobytes(), count
        assert comm.rank == 1 or x.numpy().tobytes() == values[comm.rank].tobytes()
    assert was_direct(comm) == launches_together(comm)


def registered_arrays_are_used_where_they_lie(comm: pycoll.Communicator) -> None:
    n, count = comm.size, 40_000
    parts = {
        "all_reduce": (1, 1), "all_gather": (1, n), "reduce_scatter": (n, 1), "all_to_all": (n, n),
    }  # fmt: skip
    for collective, (ins, outs) in parts.items():
        x = comm.empty(count * ins, "f32", device=0)
        out = comm.empty(count * outs, "f32", device="cuda:0")
        x.copy_from(inputs(n, count * ins)[comm.rank])
        expected = DeviceArray.empty(count * outs)
        plain = DeviceArray.of(x.numpy())
        getattr(comm, collective)(plain, out=expected)
        getattr(comm, collective)(x, out=out)
        assert out.numpy().tobytes() == expected.numpy().tobytes(), collective
        assert was_direct(comm), collective
        assert was_direct(comm, -2) == launches_together(comm), collective


def register_and_unregister_of_own_arrays(comm: pycoll.Communicator) -> None:
    x = DeviceArray.of(np.full(350_000, comm.rank, np.float32))
    part = x.part(1000, 300_000)
    assert comm.register(x) is x
    comm.all_reduce(part)
    assert was_direct(comm)
    got, total = x.numpy(), sum(range(comm.size))
    assert (got[1000:301_000] == total).all() and (got[301_000:] == comm.rank).all()
    comm.synchronize()
    comm.unregister(x)
    with pytest.raises(UsageError, match="not registered"):
        comm.unregister(x)
    comm.all_reduce(part)
    assert was_direct(comm) == launches_together(comm)
    assert (part.numpy() == total * comm.size).all()


def registered_arrays_replay_in_a_graph(comm: pycoll.Communicator) -> None:
    stream = _core.DeviceStream()
    x = comm.empty(20_000, "f32", device=0)
    out = comm.empty(20_000, "f32", device=0)
    x.stream = out.stream = stream.handle
    x.copy_from(np.full(20_000, comm.rank + 1, np.float32))
    comm.all_reduce(x, out=out)
    comm.synchronize()
    comm.barrier()
    stream.begin_capture()
    comm.all_reduce(x, out=out)
    graph = stream.end_capture()
    for step in range(10):
        x.copy_from(np.full(20_000, step + comm.rank, np.float32))
        stream.launch(graph)
        assert (out.numpy() == comm.size * step + sum(range(comm.size))).all()


@both
def test_registered_arrays(threads):
    work = in_turn(
        direct_without_registered_arrays_needs_a_common_launch,
        ranks_in_place_and_not_in_place_agree,
        registered_arrays_are_used_where_they_lie,
        register_and_unregister_of_own_arrays,
        registered_arrays_replay_in_a_graph,
    )
    run_ranks(work, 3, threads=threads, timeout_s=TIMEOUT_S)


def test_registered_arrays_at_other_places_are_a_mismatch():
    def work(comm: pycoll.Communicator) -> str:
        x = comm.empty(50_000, "f32", device=0)
        comm.all_reduce(x)
        with pytest.raises(CollectiveMismatchError) as caught:
            comm.all_reduce(x.part(comm.rank, 40_000))
            comm.synchronize()
        return str(caught.value)

    for text in run_ranks(work, 2, timeout_s=TIMEOUT_S):
        assert "at different offsets in their registered arrays" in text


def test_process_that_is_forked_from_one_with_a_device_cannot_use_it():
    def work(_: pycoll.Communicator) -> str:
        DeviceArray.of(np.ones(3))
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                DeviceArray.of(np.ones(3))
            except CudaError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.close(writer)
        os.wait()
        return os.read(reader, 4096).decode()

    assert "initialization error" in run_ranks(work, 1)[0]


def test_arrays_and_ten_communicators_leave_nothing():
    def work(comm: pycoll.Communicator) -> None:
        def device_maps() -> int:
            maps = Path("/proc/self/maps").read_text()
            return sum("pycoll-device" in line for line in maps.splitlines())

        for step in range(10):
            part = comm.split(0)
            assert part is not None
            for _ in range(5):
                part.all_reduce(DeviceArray.of(np.ones(1000, np.float32)))
            registered = part.empty(10_000, "f32", device=0)
            part.all_reduce(registered)
            part.close()
            del registered
            gc.collect()
            if step == 1:
                before = device_maps(), len(os.listdir("/proc/self/fd"))
        assert device_maps() <= before[0]
        assert len(os.listdir("/proc/self/fd")) <= before[1] + 1

    before = shared_memory_files()
    run_ranks(work, 2, timeout_s=TIMEOUT_S)
    assert shared_memory_files() == before


class Foreign:
    """An array of another library: all that it has is the interface."""

    def __init__(self, array: DeviceArray, **changes: Any) -> None:
        self._array = array
        self.shape = array.shape
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | changes


def arrays_of_other_libraries_are_taken_by_their_interface(comm: pycoll.Communicator) -> None:
    x = DeviceArray.of(np.full((4, 6), comm.rank, np.float32))
    comm.all_reduce(Foreign(x))
    assert (x.numpy() == 1).all()
    gathered = comm.all_gather(Foreign(x))
    assert isinstance(gathered, DeviceArray) and gathered.numpy().shape == (8, 6)
    with pytest.raises(UsageError, match="read-only"):
        comm.all_reduce(Foreign(x, data=(x.memory.address, True)))
    with pytest.raises(UsageError, match="contiguous"):
        comm.all_reduce(Foreign(x, strides=(4, 16)))
    comm.all_reduce(Foreign(x, strides=(24, 4)))
    host = np.ones(4, np.float32)
    with pytest.raises(UsageError, match="not in memory of a device"):
        comm.all_reduce(Foreign(x, data=(host.ctypes.data, False)))


def device_array_copies_both_ways_and_says_what_is_wrong(comm: pycoll.Communicator) -> None:
    x = DeviceArray.of(np.arange(10, dtype=np.int16))
    np.testing.assert_array_equal(x.part(2, 5).numpy(), np.arange(2, 7))
    assert DeviceArray.empty((3, 0)).numpy().shape == (3, 0)
    with pytest.raises(UsageError, match="bytes"):
        x.copy_from(np.zeros(3))
    with pytest.raises(UsageError, match="not all within the array"):
        x.part(8, 3)
    with pytest.raises(UsageError, match="device is 99"):
        DeviceArray.empty(4, device=99)
    assert [device_number(d) for d in (2, "cuda", "cuda:3")] == [2, 0, 3]
    with pytest.raises(UsageError):
        device_number("cpu")


def test_what_is_an_array_of_a_device():
    work = in_turn(
        arrays_of_other_libraries_are_taken_by_their_interface,
        device_array_copies_both_ways_and_says_what_is_wrong,
    )
    run_ranks(work, 2, timeout_s=TIMEOUT_S)


def test_info_shows_the_devices(library):
    def work(comm: pycoll.Communicator) -> dict[str, Any]:
        return _core.device_info()

    found = run_ranks(work, 1)[0]
    assert found["kind"] == library and found["devices"][0]["name"]


def test_without_a_library_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PYCOLL_DEVICE_LIBRARY", "/nowhere/library.so")

    class Claims:
        shape = (4,)
        __cuda_array_interface__ = {
            "shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3,
        }  # fmt: skip

    def work(comm: pycoll.Communicator) -> None:
        with pytest.raises(UsageError, match="cannot open /nowhere/library.so"):
            comm.all_reduce(Claims())
        assert _core.device_info()["devices"] == []

    run_ranks(work, 1)
