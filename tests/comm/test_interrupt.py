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
from processes import wait_for_pids, wait_until_gone

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


BLOCKING = {
    "all_reduce": "comm.all_reduce(x)",
    "large_all_reduce": "comm.all_reduce(np.ones(500_000))",
    "barrier": "comm.barrier()",
    "broadcast": "comm.broadcast(x, root=1)",
    "split": "comm.split(0)",
    "work": "comm.all_reduce(x, async_op=True).wait()",
    "behind_work": "comm.all_reduce(x, async_op=True); comm.all_reduce(x)",
}


def blocking_script(call: str, folder: Path) -> str:
    """Rank 0 waits in the call for rank 1, which never calls it."""
    return f"""
        import os, pathlib, sys, time
        import numpy as np
        import pycoll

        def work(comm):
            comm.barrier()
            x = np.ones(10)
            interrupted = pathlib.Path({str(folder)!r}, "interrupted")
            if comm.rank == 1:
                while not interrupted.exists():
                    time.sleep(0.01)
                return
            pathlib.Path({str(folder)!r}, "rank0").write_text(str(os.getpid()))
            try:
                {call}
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


def test_ctrl_c_in_a_blocked_rank_raises_keyboard_interrupt_promptly(tmp_path):
    folders = {name: tmp_path / name for name in BLOCKING}
    parents = {}
    try:
        for name, folder in folders.items():
            folder.mkdir()
            parents[name] = start(blocking_script(BLOCKING[name], folder))
        pids = {name: wait_for_pids(folder, 1)[0] for name, folder in folders.items()}
        time.sleep(0.3)  # until they are well inside
        for name, parent in parents.items():
            sent_s = time.monotonic()
            os.kill(pids[name], signal.SIGINT)
            out, _ = parent.communicate(timeout=20)
            assert "raised KeyboardInterrupt" in out, name
            took_s = float((folders[name] / "interrupted").read_text()) - sent_s
            assert took_s < 10, name
    finally:
        for parent in parents.values():
            parent.kill()
            parent.wait()
            parent.stdout.close()


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
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
    wait_until_gone(pids)
