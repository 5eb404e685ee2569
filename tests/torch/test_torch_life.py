"""A group's life: made, divided, made again; nothing of it stays."""

from __future__ import annotations

import copy
import datetime
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
from torch_ranks import init, run_group, same
from torchrun import torchrun_verbose

import pycoll
import pycoll.torch
from pycoll.torch import shim

pytestmark = [pytest.mark.ranks, pytest.mark.torch]

ROOT = Path(pycoll.__file__).parents[1]


def total(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    dist.all_reduce(x, group=group)
    return x.sum().item()


def test_new_groups_and_meshes_reduce_among_their_members():
    from torch.distributed.device_mesh import init_device_mesh

    def work(rank: int, n: int) -> None:
        even = dist.new_group([0, 2])
        pairs, _ = dist.new_subgroups(2)
        if rank in (0, 2):
            assert total(torch.tensor([float(rank)]), even) == 2
        assert total(torch.tensor([float(rank)]), pairs) == (1 if rank < 2 else 5)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert total(torch.tensor([float(rank)]), mesh.get_group("tp")) == (1 if rank < 2 else 5)
        assert total(torch.tensor([float(rank)]), mesh.get_group("dp")) == (
            2 if rank % 2 == 0 else 4
        )
        flat = mesh["dp", "tp"]._flatten()
        assert total(torch.tensor([1.0]), flat.get_group()) == 4
        dist.destroy_process_group(pairs)
        assert total(torch.ones(1)) == 4

    run_group(work, 4)


def test_split_gives_a_backend_to_members_and_nothing_to_others():
    def work(rank: int, n: int) -> None:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.supports_splitting and backend.supports_coalescing
        options = copy.deepcopy(backend.options)
        assert type(options) is pycoll.torch.Options
        backend.perform_nocolor_split(torch.device("cpu"))
        part = dist.group.WORLD.split_group(
            [0, 2], timeout=datetime.timedelta(seconds=10), opts=options, group_name="even"
        )
        assert (part is None) == (rank == 1)
        if part is not None:
            x = torch.tensor([float(rank)])
            part.allreduce([x]).wait()
            assert x.item() == 2 and part.size() == 2

    run_group(work, 3)


def test_options_reach_the_group(tmp_path):
    def work(comm: pycoll.Communicator) -> None:
        comm.close()
        options = pycoll.torch.Options(deterministic=True)
        init(comm.rank, 2, tmp_path / "store", pg_options=options)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options.deterministic
        assert total(torch.ones(10)) == 20
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="pg_options is a int"):
            init(comm.rank, 2, tmp_path / "other", pg_options=3)

    pycoll.run_ranks(work, 2)


def test_world_of_one_needs_nobody():
    def work(rank: int, n: int) -> None:
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

    run_group(work, 1)


def counts() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of this process."""
    maps = Path("/proc/self/maps").read_text().count("\n")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cycles(comm: pycoll.Communicator, path: Path, num_cycles: int) -> tuple[tuple, tuple, int, int]:
    comm.close()
    store = dist.FileStore(str(path), 2)
    before, rss = counts(), 0
    for cycle in range(num_cycles):
        dist.init_process_group("pycoll", store=store, rank=comm.rank, world_size=2)
        x = torch.ones(10)
        dist.all_reduce(x, async_op=True).wait()
        work = dist.isend(x, 1) if comm.rank == 0 else dist.irecv(x, 0)
        work.wait()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        y = backend.allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu"))
        dist.all_reduce(y.fill_(1))
        del backend, work
        dist.destroy_process_group()
        del y
        if cycle == num_cycles // 5:
            before, rss = counts(), rss_bytes()
    return before, counts(), rss, rss_bytes()


@pytest.mark.timeout(400)  # three seconds, where there is a core for each rank
def test_group_made_and_destroyed_again_and_again_leaks_nothing(tmp_path):
    num_cycles = 1000
    # Through one store: the ranks must not find what an earlier group has left there.
    for before, after, rss_before, rss_after in pycoll.run_ranks(
        cycles, 2, tmp_path / "store", num_cycles
    ):
        assert all(b <= a + 2 for a, b in zip(before, after, strict=True)), (before, after)
        assert rss_after - rss_before < 4096 * num_cycles + (8 << 20), (rss_before, rss_after)


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


@pytest.mark.timeout(200)
def test_script_that_destroys_nothing_ends(tmp_path):
    script = """
        import os, torch, torch.distributed as dist, pycoll.torch
        rank = int(os.environ["RANK"])
        dist.init_process_group("pycoll")
        x = torch.ones(1000)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.all_reduce(x)
        assert x[0] == 4
        print("fine", flush=True)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    output, errors = torchrun_verbose(2, tmp_path / "script.py", timeout_s=100)
    assert output.count("fine") == 2
    assert "terminate" not in errors and "Traceback" not in errors, errors


def test_detail_level_of_debugging_works():
    script = """
        import torch, torch.distributed as dist, pycoll, pycoll.torch

        def work(comm, path):
            dist.init_process_group("pycoll", store=dist.FileStore(path, 2), rank=comm.rank,
                                    world_size=2)
            x = torch.ones(3)
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            assert x.tolist() == [4] * 3
            outs = [torch.zeros(3) for _ in range(2)]
            dist.all_gather(outs, x)
            dist.barrier()
            try:
                dist.all_reduce(torch.ones(2 + comm.rank))
            except RuntimeError as error:
                assert "shape" in str(error).lower(), error
                print("named")
            dist.destroy_process_group()

        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            pycoll.run_ranks(work, 2, folder + "/store")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("named") == 2


def test_forked_child_that_ends_does_not_take_the_rank_with_it():
    def work(rank: int, n: int) -> None:
        assert total(torch.ones(1)) == n
        child = os.fork()
        if child == 0:
            dist.destroy_process_group()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        if rank == 1:
            time.sleep(0.5)  # who waits long looks at whether its peers are still there
        dist.barrier()
        assert total(torch.ones(1)) == n

    run_group(work, 2)


def test_rank_that_is_done_may_close_at_once():
    """Its operation is over: the others, which still read, are not told that it gave up."""

    def work(rank: int, n: int) -> None:
        x = torch.ones(1 << 16)
        for _ in range(100):
            group = dist.new_group(list(range(n)))
            for pending in [dist.broadcast(x, 0, group=group, async_op=True) for _ in range(2)]:
                pending.wait()
            dist.destroy_process_group(group)

    run_group(work, 3)


def test_callback_that_destroys_its_own_group_is_told_where_to_do_it():
    def work(rank: int, n: int) -> None:
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

    run_group(work, 2)
