"""Runs the command line for tests, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import pycoll
from pycoll.cli import app

ROOT = Path(pycoll.__file__).parents[1]


def invoke(*args: str, status: int = 0) -> str:
    """Runs a command in this process; returns what it prints."""
    result = CliRunner().invoke(app, args)
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, **more}


def start(*args: str, **more: str) -> subprocess.Popen[str]:
    """Starts a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "pycoll", *args],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*args: str, status: int = 0, **more: str) -> tuple[str, str]:
    process = start(*args, **more)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, (out, err)
    return out, err
