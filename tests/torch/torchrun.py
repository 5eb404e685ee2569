"""torchrun as a user starts it, ended together with its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(num_ranks: int, script: Path, *arguments: str, timeout_s: float = 240) -> str:
    """Standard output of all ranks. Fails with standard error when one of them does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(num_ranks)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [*launcher, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:  # also pytest's own limit
        # It ends its workers, which lead sessions of their own: a launcher that is killed would
        # leave them behind.
        process.terminate()
        output, errors = process.communicate(timeout=40)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise AssertionError(f"still ran after {timeout_s} s\n{output}\n{errors}") from None
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output
