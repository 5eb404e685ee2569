"""Ranks that die, stay away or make another call: a typed error that names rank and reason."""

from __future__ import annotations

import datetime
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch_ranks import cpu_backend, finish, init, note, on_ranks, run_group, wait_for_note

import pycoll
import pycoll.torch

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

CALLS = {
    "blocking": lambda x, group: dist.all_reduce(x, group=group),
    "work": lambda x, group: dist.all_reduce(x, group=group, async_op=True).wait(),
    "future": lambda x, group: dist.all_reduce(x, group=group, async_op=True).get_future().wait(),
    "recv": lambda x, group: dist.recv(x, 1, group=group),
    "list": lambda x, group: dist.all_gather_into_tensor(
        torch.empty(dist.get_world_size() * x.numel()), x, group=group, async_op=True
    ).wait(),
}


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


def test_killed_rank_is_named_at_once_by_every_kind_of_call():
    def work(rank: int, n: int) -> dict[str, tuple[str, str, float]]:
        """All calls wait at the same time, each in a group and a thread of its own."""
        groups = {how: dist.new_group() for how in CALLS}
        for group in groups.values():
            dist.all_reduce(torch.ones(8), group=group)
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        began, found = time.monotonic(), {}

        def call(how: str) -> None:
            try:
                CALLS[how](torch.ones(8), groups[how])
            except RuntimeError as error:
                found[how] = type(error).__name__, str(error), time.monotonic() - began

        threads = [threading.Thread(target=call, args=(how,)) for how in CALLS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    outcomes = run_group(work, 3, return_errors=True)
    assert isinstance(outcomes[1], pycoll.PeerDiedError)
    for found in (outcomes[0], outcomes[2]):
        assert found.keys() == CALLS.keys()
        for how, (name, text, took_s) in found.items():
            # torch's future may raise what it holds as a plain RuntimeError.
            assert name == "DistBackendError" or how == "future", (how, name)
            assert "rank 1" in text and "signal 9" in text, text
            assert took_s < 10, how  # the timeout is 30 s


@pytest.mark.parametrize("is_async", [False, True])
@on_ranks(2)
def test_other_call_names_ranks_shapes_and_dtypes(rank, n, is_async):
    x = torch.ones((4, 2) if rank else (3, 2), dtype=torch.float32 if rank else torch.float64)
    with pytest.raises(dist.DistBackendError) as caught:
        finish(dist.all_reduce(x, async_op=is_async))
    with pytest.raises(dist.DistBackendError):  # broken for good
        dist.barrier()
    text = str(caught.value)
    for part in ("rank 0", "rank 1", "(4, 2)", "(3, 2)", "f32", "f64", "all_reduce"):
        assert part in text, text
    # Where in the user's code, on both ranks.
    assert text.count("test_torch_failures.py:") == 2, text


@on_ranks(3)
def test_another_collective_on_one_rank_is_named(rank, n):
    x = torch.ones(5, 2)
    with pytest.raises(RuntimeError) as error:
        if rank == 1:
            dist.broadcast(x, src=0)
        else:
            dist.all_reduce(x)
    text = str(error.value)
    assert "all_reduce" in text and "broadcast" in text and "rank 1" in text, text


@on_ranks(2)
def test_absent_rank_times_out_after_the_timeout_of_the_call(rank, n):
    dist.barrier()
    if rank == 1:
        return wait_for_note("done")
    options = dist.AllreduceOptions()
    options.timeout = seconds(0.3)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=r"waited 0\.3 s") as caught:
        dist.group.WORLD.allreduce([torch.ones(2)], options).wait()
    assert "rank 1" in str(caught.value) and 0.25 < time.monotonic() - began < 10
    note("done")


@on_ranks(2)
def test_absent_rank_times_out_after_the_timeout_of_the_group(rank, n):
    """A new timeout also holds for messages after the first one."""
    group, x = dist.new_group(), torch.ones(2)
    dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)
    pycoll.torch.set_timeout(seconds(0.3))
    pycoll.torch.set_timeout(seconds(0.4), group)
    dist.barrier()
    if rank == 0:
        return wait_for_note("done")
    with pytest.raises(dist.DistBackendError, match=r"waited 0\.4 s") as caught:
        dist.recv(x, 0, group=group)
    assert "test_torch_failures.py:" in str(caught.value) or "recv" in str(caught.value)
    with pytest.raises(dist.DistBackendError, match=r"waited 0\.3 s"):
        dist.all_reduce(torch.ones(2))
    note("done")


def test_failure_leaves_flight_records_where_asked(tmp_path):
    def work(rank: int, n: int) -> None:
        os.environ["PYCOLL_FLIGHT_DIR"] = str(tmp_path)
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3 + rank), group=group)

    run_group(work, 2)
    files = sorted(tmp_path.glob("pycoll-*.json"))
    assert len(files) == 2
    for rank, path in enumerate(files):
        flight = json.loads(path.read_text())
        assert flight["rank"] == rank and flight["pycoll"]["failure"]["kind"] == "mismatch"
        assert [entry["state"] for entry in flight["entries"]] == ["completed", "started"]
        frames = [entry["frames"] for entry in flight["entries"]]
        assert all(frame[0]["filename"].endswith(Path(__file__).name) for frame in frames)
        (config,) = flight["pg_config"].values()
        assert config["desc"].startswith("torch group ")


@on_ranks(2)
def test_wait_with_a_timeout_gives_up_and_the_operation_goes_on(rank, n):
    x = torch.ones(2)
    if rank == 1:
        wait_for_note("gave up")
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="still going on after 200 ms"):
            work.wait(datetime.timedelta(milliseconds=200))
        assert not work.is_completed()
        note("gave up")
    work.wait()
    assert work.is_completed() and work.is_success()
    assert x.tolist() == [n, n]


@on_ranks(3, group=False)
def test_rank_that_never_joins_is_named(rank, n, tmp_path):
    if rank != 1:
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            init(rank, n, tmp_path / "store", timeout_s=1)


@on_ranks(2)
def test_abort_from_another_thread_ends_a_wait(rank, n):
    dist.barrier()
    if rank == 1:
        return wait_for_note("aborted")
    threading.Timer(0.2, dist.group.WORLD.abort).start()
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="gave this communicator up|abort"):
        dist.all_reduce(torch.ones(3))
    assert time.monotonic() - began < 10
    note("aborted")


@on_ranks(2)
def test_ctrl_c_ends_a_blocking_call_and_a_wait(rank, n):
    dist.barrier()
    if rank == 1:
        return wait_for_note("interrupted")
    for call in (
        lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        lambda: dist.recv(torch.ones(3), 1),
        lambda: dist.all_reduce(torch.ones(3)),
    ):
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert time.monotonic() - began < 10
    note("interrupted")
    dist.group.WORLD.abort()


@on_ranks(1)
def test_gpu_tensor_and_sparse_gather_raise_a_clear_error(rank, n):
    with pytest.raises(ValueError, match="expected the CPU or a CUDA device"):
        cpu_backend().broadcast([torch.ones(2, device="meta")]).wait()
    with pytest.raises(ValueError, match="dense"):
        cpu_backend().broadcast([torch.eye(2).to_sparse()]).wait()
