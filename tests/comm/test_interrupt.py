"""Ctrl-C: a rank that waits raises KeyboardInterrupt at once, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from comm_cases import both

import pycoll

pytestmark = pytest.mark.ranks

ROOT = Path(pycoll.__file__).parents[1]


def start(script: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_pids(folder: Path, count: int) -> list[int]:
    """Waits until so many ranks have written their process ids into files of the folder."""
    deadline = time.monotonic() + 20
    while True:
        texts = [path.read_text() for path in folder.glob("rank*")]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)


BLOCKING = {
    "all_reduce": "comm.all_reduce(x)",
    "large_all_reduce": "comm.all_reduce(np.ones(500_000))",
    "barrier": "comm.barrier()",
    "broadcast": "comm.broadcast(x, root=1)",
    "split": "comm.split(0)",
    "work": "comm.all_reduce(x, async_op=True).wait()",
    "behind_work": "comm.all_reduce(x, async_op=True); comm.all_reduce(x)",
}


@pytest.mark.parametrize("name", BLOCKING)
def test_ctrl_c_in_a_blocked_rank_raises_keyboard_interrupt_promptly(name, tmp_path):
    """Rank 1 never comes; rank 0 waits, and is interrupted."""
    script = f"""
        import os, pathlib, sys, time
        import numpy as np
        import pycoll

        def work(comm):
            comm.barrier()
            x = np.ones(10)
            interrupted = pathlib.Path({str(tmp_path)!r}, "interrupted")
            if comm.rank == 1:
                while not interrupted.exists():
                    time.sleep(0.01)
                return
            pathlib.Path({str(tmp_path)!r}, "rank0").write_text(str(os.getpid()))
            try:
                {BLOCKING[name]}
            except KeyboardInterrupt:
                interrupted.write_text(str(time.monotonic()))
                raise

        try:
            pycoll.run_ranks(work, 2, timeout_s=30)
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
        except pycoll.Error as error:
            print(error)
    """
    parent = start(script)
    try:
        (pid,) = wait_for_pids(tmp_path, 1)
        time.sleep(0.3)  # until it is well inside
        sent_s = time.monotonic()
        os.kill(pid, signal.SIGINT)
        out, _ = parent.communicate(timeout=20)
    finally:
        parent.kill()
        parent.wait()
    assert "raised KeyboardInterrupt" in out
    took_s = float((tmp_path / "interrupted").read_text()) - sent_s
    print(f"\nCtrl-C in {name}: {took_s * 1e3:.0f} ms")
    assert took_s < 0.5


@both
def test_ctrl_c_in_the_caller_of_run_ranks_leaves_no_process(threads, tmp_path):
    script = f"""
        import os, pathlib, time
        import numpy as np
        import pycoll

        def work(comm):
            comm.barrier()
            pathlib.Path({str(tmp_path)!r}, f"rank{{comm.rank}}").write_text(str(os.getpid()))
            while True:
                comm.all_reduce(np.ones(1000))

        try:
            pycoll.run_ranks(work, 3, threads={threads})
        except KeyboardInterrupt:
            print("interrupted")
    """
    parent = start(script)
    try:
        pids = wait_for_pids(tmp_path, 3)
        time.sleep(0.2)
        parent.send_signal(signal.SIGINT)
        out, _ = parent.communicate(timeout=20)
    finally:
        parent.kill()
        parent.wait()
    assert out == "interrupted\n"
    assert parent.returncode == 0
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"some of {pids} still run"
        time.sleep(0.02)
