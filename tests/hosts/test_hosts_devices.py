"""Arrays of devices whose ranks are on several hosts: through pinned memory, in parts."""

from __future__ import annotations

import threading
from typing import Any

import builds
import numpy as np
import pytest
from comm_cases import inputs
from namespaces import values

import pycoll
from pycoll import AbortedError, PeerDiedError, UsageError, _core
from pycoll.arrays.device import DeviceArray
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import arguments, roots_of, run

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400, func_only=True)]

Comm = pycoll.Communicator
PART_BYTES = 4 << 20  # of a message


@pytest.fixture(scope="module")
def library() -> str:
    """The emulated device."""
    folder = builds.plain()
    builds.build(folder, "device_threads")
    return str(folder / "_device_threads.so")


def check(comm: Comm, name: str, rows: int, root: int, **options: Any) -> None:
    """On an array of this rank's device; int32, whose sums are exact in any order."""
    oracle = ORACLES[name]
    shape = (comm.size, *oracle.leading(comm.size, rows))
    values = (1000 * inputs(comm.size, int(np.prod(shape[1:])), seed=rows)).astype(np.int32)
    values = values.reshape(shape)
    x = DeviceArray.of(values[comm.rank])
    asynchronous = options.get("async_op", False)
    given = arguments(name, root) | options
    result = getattr(comm, name)(x, **given) if asynchronous else run(comm, name, x, **given)
    if asynchronous:
        result = result.wait()
    expected = oracle.expected(values, comm.rank, root, "sum")
    if expected is None:
        return
    got = (x if oracle.in_place else result).numpy()
    np.testing.assert_array_equal(got, expected, err_msg=f"{name} {rows} {root} {options}")


def everything(comm: Comm) -> None:
    parts = PART_BYTES // 4
    for name in ORACLES:
        for root in roots_of(name, comm.size):
            check(comm, name, 4099, root)
        for rows in (0, 1, 2 * parts // comm.size + 3):  # the last in several parts
            check(comm, name, rows, 0)


def asynchronous(comm: Comm) -> None:
    count = 3 * PART_BYTES // 4
    stream = _core.DeviceStream()
    arrays = [
        DeviceArray.of(np.full(count, comm.rank + i, np.int32), stream=stream.handle)
        for i in range(4)
    ]
    works = [comm.all_reduce(x, async_op=True) for x in arrays]
    for i, (x, work) in enumerate(zip(arrays, works, strict=True)):
        work.wait()  # later work of the stream is behind it
        comm.all_reduce(x, "max")
        total = sum(range(comm.size)) + i * comm.size
        assert (x.numpy() == total).all(), i
        assert work.done() and work.exception() is None
    with comm.coalesce():
        for x in arrays:
            comm.broadcast(x, root=1)
    comm.synchronize()
    mine = comm.empty(1000, "f32", device=0)
    comm.all_reduce(mine, "avg")
    assert (mine.numpy() == 0).all()
    other = DeviceArray.of(np.ones(10, np.float32))
    comm.register(other)
    comm.all_reduce(other)
    comm.unregister(other)
    assert (other.numpy() == comm.size).all()
    counts = [rank + 1 for rank in range(comm.size)]
    rows = DeviceArray.of(np.full((comm.rank + 1, 2), comm.rank, np.int32))
    gathered = comm.all_gather(rows, counts=counts)
    expected = np.repeat(np.arange(comm.size), counts)
    assert (gathered.numpy()[:, 0] == expected).all()
    assert "pinned CPU memory" in comm.explain("all_reduce", 1 << 20, on_device=True)
    stream.begin_capture()
    with pytest.raises(UsageError, match="cannot be captured when the ranks are on several hosts"):
        comm.all_reduce(arrays[0])
    stream.end_capture()
    comm.all_reduce(arrays[0], "min")


def aborted(comm: Comm) -> None:
    """Parts that crossed before the error are delivered before it is raised, not after."""
    count = 3 * PART_BYTES // 4
    x = DeviceArray.empty(count, np.int32)
    for turn in range(12):
        part = comm.split(0)
        assert part is not None
        if comm.rank == comm.size - 1:
            threading.Timer(0.02 + 0.002 * turn, part.abort).start()
        with pytest.raises(AbortedError):
            while True:
                part.all_reduce(x, "max")
        x.copy_from(np.full(count, 777, np.int32))
        comm.barrier()
        assert (x.numpy() == 777).all()
        x.copy_from(np.zeros(count, np.int32))
        part.close()


@pytest.mark.slow
def test_every_collective_and_asynchronous_registered_captured_and_aborted(two, library):
    jobs = [everything, asynchronous, aborted]
    two.run_jobs(jobs, 2, timeout_s="60", PYCOLL_DEVICE_LIBRARY=library)


def test_rank_that_is_gone_is_named(two, library):
    def job(comm: Comm) -> str:
        x = DeviceArray.of(np.ones(3 * PART_BYTES // 4, np.float32))
        comm.all_reduce(x)
        if comm.rank == 3:
            return "left"
        with pytest.raises(PeerDiedError) as died:
            comm.all_reduce(x, async_op=comm.rank == 1).wait(30) if comm.rank == 1 else (
                comm.all_reduce(x)
            )
        return str(died.value)

    (said,) = two.run_jobs([job], 2, timeout_s="30", PYCOLL_DEVICE_LIBRARY=library)
    assert said[3] == "left"
    assert all("rank 3" in text for text in said[:3]), said


@pytest.mark.first
@pytest.mark.slow  # builds an extension of torch, once
@pytest.mark.torch
def test_torch_groups_give_the_bits_of_the_cpu(two, library, monkeypatch):
    torch = pytest.importorskip("torch", reason="needs torch")
    import torch.distributed as dist

    monkeypatch.syspath_prepend(builds.ROOT / "tests" / "device")
    import torch_emulated

    import pycoll.torch  # noqa: F401  built now, and not by the ranks

    torch_emulated.build()

    def job() -> None:
        torch_emulated.install()
        from test_torch_device_models import train
        from test_torch_devices import calls

        device = torch.device(torch_emulated.NAME, 0)
        torch.accelerator.set_device_index(0)
        dist.init_process_group("pycoll", init_method="env://")
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            for count in (1, 1000):
                pairs = zip(
                    calls(device, dtype, count),
                    calls(torch.device("cpu"), dtype, count),
                    strict=True,
                )
                assert all(a.equal(b) for a, b in pairs), (dtype, count)
        wrap = torch.nn.parallel.DistributedDataParallel
        got, expected = train(device, wrap), train(torch.device("cpu"), wrap)
        assert all(a.equal(b) for a, b in zip(got, expected, strict=True))
        dist.destroy_process_group()

    values(two.outcomes(two.start_world(job, [0, 0, 1, 1], PYCOLL_DEVICE_LIBRARY=library), 300))


@pytest.mark.first
@pytest.mark.slow  # builds an extension of torch, once
@pytest.mark.torch
def test_gossip_gives_the_bits_of_the_cpu(two, library, monkeypatch):
    pytest.importorskip("torch", reason="needs torch")
    monkeypatch.syspath_prepend(builds.ROOT / "tests" / "device")
    import torch_emulated

    torch_emulated.build()

    def job() -> list[str]:
        torch_emulated.install()
        from test_device_replicas import KINDS, pairs_keep_the_sum, replicas_have_the_bits

        comm = pycoll.init()
        comm.deterministic = True
        some = {name: KINDS[name] for name in ("gossip:graph=ring", "gossip:mode=sgp")}
        wrong = replicas_have_the_bits(some, torch_emulated.NAME, comm)
        return wrong + pairs_keep_the_sum(torch_emulated.NAME, comm)

    world = two.start_world(job, [0, 0, 1, 1], PYCOLL_DEVICE_LIBRARY=library)
    found = values(two.outcomes(world, 300))
    assert not any(found), found
