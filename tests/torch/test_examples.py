"""Every torch example runs and agrees with one process.

Quick: as forks of this process with torchrun's environment. Slow: under torchrun, with more ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")  # of the digits

from group_ranks import BACKEND  # noqa: E402
from torchrun import torchrun  # noqa: E402

import pycoll  # noqa: E402

# Once, not in every rank.
for module in ("_dynamo", "distributed.fsdp", "distributed.pipelining", "distributed.tensor"):
    importlib.import_module(f"torch.{module}")

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCH_EXAMPLES = sorted(
    path.stem for path in EXAMPLES.glob("*.py") if "torchrun --nproc-per-node" in path.read_text()
)
COMMANDS = [
    *([name] for name in TORCH_EXAMPLES),
    ["ddp_digits", "--hook", "bf16"],
    ["ddp_digits", "--hook", "int8"],
    *([] if BACKEND == "gloo" else [["fsdp2_gpt", "--divide-factor", "3"]]),
]
AGREES = re.compile(r": at most (\S+) off one process \(allowed (\S+)\): ok")


def check_output(text: str, num_ranks: int) -> None:
    assert f"{num_ranks} ranks" in text or f"{num_ranks} stages" in text
    found = AGREES.findall(text)
    assert found, text
    assert all(float(off) <= float(allowed) for off, allowed in found)


def test_there_are_the_examples_that_the_documents_name():
    assert TORCH_EXAMPLES == ["ddp_digits", "dtensor_tp", "fsdp2_gpt", "pipeline_1f1b"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_example_agrees_with_one_process(command, monkeypatch):
    name, *arguments = command
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, "--backend", BACKEND, *arguments])

    def work(comm: pycoll.Communicator) -> str:
        rank, size = comm.rank, comm.size
        comm.close()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
            except SystemExit as end:
                raise AssertionError(printed.getvalue()) from end
        return printed.getvalue()

    first, *others = pycoll.run_ranks(work, 2)
    check_output(first, 2)
    assert not any(others)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", TORCH_EXAMPLES)
def test_example_runs_under_torchrun(name, num_ranks):
    output = torchrun(num_ranks, EXAMPLES / f"{name}.py", "--backend", BACKEND)
    check_output(output, num_ranks)
