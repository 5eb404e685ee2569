"""The life of a group: made, destroyed, made again, without leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_ranks import cpu_backend, init, on_ranks, same

import pycoll
import pycoll.torch
from pycoll.torch import shim

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

ROOT = Path(pycoll.__file__).parents[1]


def total(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    dist.all_reduce(x, group=group)
    return x.sum().item()


@on_ranks(2, group=False)
def test_options_reach_the_group(rank, n, tmp_path):
    init(rank, n, tmp_path / "store", pg_options=pycoll.torch.Options(deterministic=True))
    assert cpu_backend().options.deterministic
    assert total(torch.ones(10)) == 20
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="pg_options is a int"):
        init(rank, n, tmp_path / "other", pg_options=3)


@on_ranks(1)
def test_world_of_one_needs_no_other_rank(rank, n):
    x = torch.full((3,), 2.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(x, op)
    assert x.tolist() == [2] * 3
    out = torch.zeros(3)
    dist.reduce_scatter_tensor(out, x, dist.ReduceOp.AVG)
    same(out, x)
    dist.all_gather_into_tensor(out, x)
    dist.all_to_all_single(out, x)
    dist.barrier()
    box = [None]
    dist.all_gather_object(box, 1)
    assert box == [1]


def counts() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of this process."""
    maps = Path("/proc/self/maps").read_text().count("\n")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "num_cycles", [200, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
@on_ranks(2, group=False)
def test_group_made_and_destroyed_repeatedly_leaks_nothing(rank, n, tmp_path, num_cycles):
    # Through one store: the ranks must not find what an earlier group has left there.
    store = dist.FileStore(str(tmp_path / "store"), n)
    for cycle in range(num_cycles):
        dist.init_process_group("pycoll", store=store, rank=rank, world_size=n)
        x = torch.ones(10)
        dist.all_reduce(x, async_op=True).wait()
        (dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)).wait()
        y = cpu_backend().allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu"))
        dist.all_reduce(y.fill_(1))
        dist.destroy_process_group()
        del y
        if cycle == num_cycles // 5:
            before, rss = counts(), rss_bytes()
    after = counts()
    assert all(b <= a + 2 for a, b in zip(before, after, strict=True)), (before, after)
    assert rss_bytes() - rss < 4096 * num_cycles + (8 << 20), (rss, rss_bytes())


def test_group_leaves_one_key_in_the_store(tmp_path):
    def work(comm: pycoll.Communicator) -> None:
        port = np.zeros(1, np.int64)
        if comm.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port[0] = store.port
        comm.broadcast(port)
        if comm.rank == 1:
            store = dist.TCPStore("127.0.0.1", int(port[0]), is_master=False)

        def num_keys() -> int:
            comm.barrier()
            number = store.num_keys()
            comm.barrier()
            return number

        backends = []
        for i in range(3):
            before = num_keys()
            prefixed = dist.PrefixStore(f"group{i}", store)
            make = shim.load().make_backend
            backends.append(make(prefixed, comm.rank, 2, 30.0, "group", [0, 1], None))
            assert num_keys() - before == 1  # how often it was opened
        dist.init_process_group("pycoll", store=store, rank=comm.rank, world_size=2)
        before = num_keys()
        for _ in range(5):
            dist.group.WORLD.monitored_barrier()
        assert num_keys() - before == 1  # the last one's outcome
        dist.destroy_process_group()

    pycoll.run_ranks(work, 2)


def test_script_that_imports_nothing_of_ours_and_destroys_nothing_ends(tmp_path):
    """Two ranks end as Python ends, which a rank that tests fork does not: it skips its cleanup."""
    script = f"""
        import os, sys, torch, torch.distributed as dist, _pycoll_torch
        _pycoll_torch.register()
        _pycoll_torch.register()  # also by `import pycoll.torch`
        assert dist.Backend.PYCOLL == "pycoll"
        assert dist.Backend.backend_capability["pycoll"] == ["cpu", "cuda"]
        assert not [name for name in sys.modules if name.split(".")[0] == "pycoll"]
        torch.set_num_threads(1)
        rank = 0 if os.fork() else 1
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        dist.init_process_group("pycoll", store=store, rank=rank, world_size=2)
        x = torch.ones(1000)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.all_reduce(x)
        assert x[0] == 4
        print("fine", flush=True)
        if rank == 0:
            assert os.wait()[1] == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2
    assert "terminate" not in done.stderr and "Traceback" not in done.stderr, done.stderr


@on_ranks(2)
def test_forked_child_that_ends_does_not_take_the_rank_with_it(rank, n):
    assert total(torch.ones(1)) == n
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    if rank == 1:
        time.sleep(0.5)  # a rank that waits long looks at whether its peers still run
    dist.barrier()
    assert total(torch.ones(1)) == n


@on_ranks(3)
def test_rank_that_is_done_may_close_at_once(rank, n):
    """Its operation is over: the other ranks, which still read, do not fail."""
    x = torch.ones(1 << 16)
    for _ in range(50):
        group = dist.new_group(list(range(n)))
        for pending in [dist.broadcast(x, 0, group=group, async_op=True) for _ in range(2)]:
            pending.wait()
        dist.destroy_process_group(group)


@on_ranks(2)
def test_callback_that_destroys_its_own_group_raises_and_says_where_to_do_it(rank, n):
    group = dist.new_group()
    if rank == 1:
        time.sleep(0.3)  # rank 0 adds its callback to an operation that goes on
    handle = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    if rank == 0:
        after = handle.get_future().then(lambda _: dist.destroy_process_group(group))
        with pytest.raises(RuntimeError, match="destroyed in a callback of its own operation"):
            after.wait()
    handle.wait()
    assert total(torch.ones(1)) == n
