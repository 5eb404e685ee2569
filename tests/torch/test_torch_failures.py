"""Ranks that die, stop, stay away or call something else: a typed error with who and what."""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch_ranks import init, run_group

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

CALLS = {
    "blocking": lambda x: dist.all_reduce(x),
    "work": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "future": lambda x: dist.all_reduce(x, async_op=True).get_future().wait(),
    "recv": lambda x: dist.recv(x, 1),
    "coalesced": lambda x: dist.all_gather_into_tensor(
        torch.empty(dist.get_world_size() * x.numel()), x, async_op=True
    ).wait(),
}


@pytest.mark.parametrize("how", CALLS)
def test_killed_rank_is_named_within_a_second(how):
    def work(rank: int, n: int) -> tuple[str, float]:
        x = torch.ones(8)
        dist.all_reduce(x)
        if rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        # torch's future raises what it holds as a plain RuntimeError.
        expected = RuntimeError if how == "future" else dist.DistBackendError
        with pytest.raises(expected) as caught:
            CALLS[how](x)
        return str(caught.value), time.monotonic() - began

    outcomes = run_group(work, 3, return_errors=True)
    assert isinstance(outcomes[1], pycoll.PeerDiedError)
    for text, took_s in (outcomes[0], outcomes[2]):
        assert "rank 1" in text and "signal 9" in text, text
        assert took_s < 2


@pytest.mark.parametrize("is_async", [False, True])
def test_other_call_names_ranks_shapes_and_dtypes(is_async):
    def work(rank: int, n: int) -> str:
        x = torch.ones((4, 2) if rank else (3, 2), dtype=torch.float32 if rank else torch.float64)
        with pytest.raises(dist.DistBackendError) as caught:
            got = dist.all_reduce(x, async_op=is_async)
            if is_async:
                got.wait()
        with pytest.raises(dist.DistBackendError):  # broken for good
            dist.barrier()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        del backend
        return str(caught.value)

    for text in run_group(work, 2):
        for part in ("rank 0", "rank 1", "(4, 2)", "(3, 2)", "f32", "f64", "all_reduce"):
            assert part in text, text
        # Where in the user's code, of both.
        assert text.count("test_torch_failures.py:") == 2, text


def test_absent_rank_times_out_with_the_groups_timeout_and_per_call():
    def work(rank: int, n: int) -> tuple[str, float]:
        dist.barrier()
        if rank == 1:
            time.sleep(3)
            return "", 0
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=0.5)
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="waited 0.5 s") as caught:
            dist.group.WORLD.allreduce([torch.ones(2)], options).wait()
        return str(caught.value), time.monotonic() - began

    text, took_s = run_group(work, 2)[0]
    assert "rank 1" in text and 0.4 < took_s < 2

    def late(rank: int, n: int) -> None:
        pycoll.torch.set_timeout(datetime.timedelta(seconds=0.7))
        dist.barrier()
        if rank == 1:
            time.sleep(2)
            return
        with pytest.raises(dist.DistBackendError, match="waited 0.7 s"):
            dist.all_reduce(torch.ones(2))

    run_group(late, 2)


def test_new_timeout_holds_for_messages_after_the_first():
    def work(rank: int, n: int) -> None:
        x = torch.ones(2)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        pycoll.torch.set_timeout(datetime.timedelta(seconds=0.6))
        if rank == 0:
            time.sleep(2)
            return
        with pytest.raises(dist.DistBackendError, match="waited 0.6 s") as caught:
            dist.recv(x, 0)
        assert "test_torch_failures.py:" in str(caught.value) or "recv" in str(caught.value)

    run_group(work, 2)


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


def test_wait_with_a_timeout_gives_up_and_the_operation_goes_on():
    def work(rank: int, n: int) -> None:
        x = torch.ones(2)
        if rank == 1:
            time.sleep(1)
        work = dist.all_reduce(x, async_op=True)
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="still going on after 200 ms"):
                work.wait(datetime.timedelta(milliseconds=200))
            assert not work.is_completed()
        work.wait()
        assert work.is_completed() and work.is_success()
        assert x.tolist() == [n, n]

    run_group(work, 2)


def test_rank_that_never_joins_is_named(tmp_path):
    def work(comm: pycoll.Communicator) -> str:
        comm.close()
        if comm.rank == 1:
            return ""
        with pytest.raises(dist.DistBackendError) as caught:
            init(comm.rank, 3, tmp_path / "store", timeout_s=1)
        return str(caught.value)

    texts = pycoll.run_ranks(work, 3)
    assert "rank 1" in texts[0] and "rank 1" in texts[2], texts


def test_monitored_barrier_names_all_who_are_missing_and_the_group_stays_good():
    def work(rank: int, n: int) -> str:
        group = dist.group.WORLD  # dist.monitored_barrier() asks for gloo by name
        group.monitored_barrier()
        text = ""
        second = datetime.timedelta(seconds=1)
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="Ranks 1, 2 failed to pass") as caught:
                group.monitored_barrier(timeout=second, wait_all_ranks=True)
            text = str(caught.value)
        dist.barrier()
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == n
        return text

    assert run_group(work, 3)[0]


def test_abort_from_another_thread_ends_a_wait():
    import threading

    def work(rank: int, n: int) -> None:
        dist.barrier()
        if rank == 1:
            time.sleep(1.5)
            return
        threading.Timer(0.3, dist.group.WORLD.abort).start()
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="gave this communicator up|abort"):
            dist.all_reduce(torch.ones(3))
        assert time.monotonic() - began < 1.2

    run_group(work, 2)


def test_ctrl_c_ends_a_blocking_call_and_a_wait():
    import threading

    def work(rank: int, n: int) -> None:
        dist.barrier()
        if rank == 1:
            time.sleep(2)
            return
        for call in (
            lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
            lambda: dist.recv(torch.ones(3), 1),
            lambda: dist.all_reduce(torch.ones(3)),
        ):
            threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                call()
            assert time.monotonic() - began < 1
        dist.group.WORLD.abort()

    run_group(work, 2)


def test_gpu_tensor_and_sparse_gather_raise_a_clear_error():
    def work(rank: int, n: int) -> None:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        with pytest.raises(ValueError, match="expected the CPU or a CUDA device"):
            backend.broadcast([torch.ones(2, device="meta")]).wait()
        with pytest.raises(ValueError, match="dense"):
            backend.broadcast([torch.eye(2).to_sparse()]).wait()

    run_group(work, 1)
