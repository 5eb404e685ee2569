"""The protocol copy: registered arrays moved by copy engines, without a kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cases import in_turn
from comm_cases import check_refused, inputs
from device_ranks import run_ranks

import pycoll
from pycoll import _core
from pycoll.arrays.device import DeviceArray

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

TIMEOUT_S = 20
# The numbers of blocks of input and output, in units of ranks where None.
MOVES: dict[str, tuple[int | None, int | None]] = {
    "all_gather": (1, None), "all_to_all": (None, None), "broadcast": (1, 1),
}  # fmt: skip


def each_algorithm() -> list[tuple[str, str]]:
    return [(row.collective, row.name) for row in _core.algorithms() if row.collective in MOVES]


def arrays_of(comm: pycoll.Communicator, name: str, count: int) -> tuple[DeviceArray, DeviceArray]:
    """Input and output of a registered call; the input has the rank's own values."""
    ins, outs = (comm.size if k is None else k for k in MOVES[name])
    device = comm.rank if _core.device_info()["devices"][1:] else 0
    x, out = (comm.empty(count * k, "f32", device=device) for k in (ins, outs))
    x.copy_from(inputs(comm.size, count * ins)[comm.rank])
    return x, (x if name == "broadcast" else out)


def call(comm: pycoll.Communicator, name: str, x: DeviceArray, out: DeviceArray, how: str) -> None:
    given = {} if name == "broadcast" else {"out": out}
    getattr(comm, name)(x, algorithm=how, **given)


def copies_have_the_bits_of_kernels(comm: pycoll.Communicator) -> None:
    done = set()
    for name, algorithm in each_algorithm():
        for count in (1, 1001, 70_000):
            x, out = arrays_of(comm, name, count)
            try:
                call(comm, name, x, out, f"{algorithm}/copy")
            except pycoll.UsageError as error:
                assert "needs intermediate copies, which copy cannot make" in str(error)
                continue
            assert comm.flight_record()[-1]["algorithm"] == f"{algorithm}/copy"
            got = out.numpy().tobytes()
            x, out = arrays_of(comm, name, count)
            call(comm, name, x, out, f"{algorithm}/direct")
            assert got == out.numpy().tobytes(), (name, algorithm, count)
            done.add(name)
    assert done == set(MOVES)


def captured_copies_replay(comm: pycoll.Communicator) -> None:
    stream = _core.DeviceStream(0)
    x, out = arrays_of(comm, "all_gather", 3000)
    x.stream = out.stream = stream.handle
    call(comm, "all_gather", x, out, "ring/copy")
    comm.synchronize()
    comm.barrier()
    stream.begin_capture()
    call(comm, "all_gather", x, out, "ring/copy")
    graph = stream.end_capture()
    for step in range(10):
        x.copy_from(np.full(3000, step * comm.size + comm.rank, np.float32))
        stream.launch(graph)
        expected = step * comm.size + np.arange(comm.size)
        assert (out.numpy().reshape(comm.size, -1) == expected[:, None]).all()


def calls_that_copies_cannot_run_are_refused(comm: pycoll.Communicator) -> None:
    x, out = arrays_of(comm, "all_gather", 100)
    plain = DeviceArray.of(np.ones(100, np.float32))
    host = np.ones(100, np.float32)
    check_refused(
        {
            "reduces": (lambda: comm.all_reduce(x, algorithm="one_shot/copy"), "does not reduce"),
            "plain": (lambda: comm.broadcast(plain, algorithm="star/copy"), "comm.empty"),
            "host": (lambda: comm.broadcast(host, algorithm="star/copy"), "device arrays only"),
            "counts": (
                lambda: comm.all_to_all(
                    x.part(0, 3), send_counts=[1] * 3, out=out.part(0, 3), algorithm="pairwise/copy"
                ),
                "block sizes known to all ranks",
            ),
        }
    )
    call(comm, "all_gather", x, out, "ring/copy")  # no refused call was begun


@pytest.mark.parametrize("n", [2, 3, 4])
def test_copies_between_processes(n):
    cases: list[Callable] = [copies_have_the_bits_of_kernels]
    if n == 3:
        cases += [captured_copies_replay, calls_that_copies_cannot_run_are_refused]
    run_ranks(in_turn(*cases), n, timeout_s=TIMEOUT_S)


def test_copies_between_devices_of_a_process(emulated, monkeypatch):
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_COUNT", "3")
    run_ranks(copies_have_the_bits_of_kernels, 3, threads=True, timeout_s=TIMEOUT_S)


def test_copies_need_streams_that_wait(emulated, monkeypatch):
    """Ranks that are threads may use one stream, in which they would wait for each other."""

    def refused(comm: pycoll.Communicator) -> None:
        x, out = arrays_of(comm, "all_gather", 100)
        with pytest.raises(pycoll.UsageError, match=why):
            call(comm, "all_gather", x, out, "ring/copy")
        call(comm, "all_gather", x, out, "ring/direct")

    why = "ranks 0 and 1 share a device in one process"
    run_ranks(refused, 2, threads=True, timeout_s=TIMEOUT_S)
    monkeypatch.setenv("PYCOLL_DEVICE_THREADS_WORD_OPS", "0")
    why = "the device of rank 0 has no stream memory operations"
    run_ranks(refused, 2, timeout_s=TIMEOUT_S)


def test_rule_chooses_copies_and_explain_has_their_row(monkeypatch):
    monkeypatch.setenv("PYCOLL_ALGO", "all_gather:all_pairs/copy:1k-max")

    def work(comm: pycoll.Communicator) -> str:
        x, out = arrays_of(comm, "all_gather", 1000)
        comm.all_gather(x, out=out)
        assert comm.flight_record()[-1]["algorithm"] == "all_pairs/copy"
        comm.all_gather(DeviceArray.of(x.numpy()))
        assert not comm.flight_record()[-1]["algorithm"].endswith("/copy")
        return comm.explain("all_gather", 8000, mapped=True, on_device=True)

    for text in run_ranks(work, 2, timeout_s=TIMEOUT_S):
        assert "all_pairs/copy over" in text and "copy " in text
