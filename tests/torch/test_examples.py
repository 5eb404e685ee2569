"""Every torch example runs and agrees with one process.

In forked ranks with torchrun's environment; one of them under torchrun itself.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
from torch_ranks import BACKEND, on_ranks
from torchrun import torchrun

# Once, not in every rank.
for module in ("distributed.fsdp", "distributed.pipelining", "distributed.tensor"):
    importlib.import_module(f"torch.{module}")

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

EXAMPLES = Path(__file__).parents[2] / "examples"
pytest.importorskip("sklearn")  # ddp_digits reads its digits
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


@pytest.fixture
def ports() -> list[int]:
    """A free port for each number of ranks: a second group in one process needs another one."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(5)]
        return [server.getsockname()[1] for server in servers]


def run_example(rank: int, n: int, command: list[str], ports: list[int]) -> None:
    name, *arguments = command
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as printed:
        numbers = {"MASTER_PORT": ports[n], "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n}
        for variable, value in {"MASTER_ADDR": "localhost", **numbers}.items():
            patch.setenv(variable, str(value))
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "argv", [name, "--backend", BACKEND, *arguments])
        with contextlib.redirect_stdout(printed):
            try:
                runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
            except SystemExit as end:
                raise AssertionError(printed.getvalue()) from end
        if rank == 0:
            check_output(printed.getvalue(), n)
        else:
            assert not printed.getvalue()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@on_ranks(2, group=False)
def test_example_agrees_with_one_process(rank, n, command, ports):
    run_example(rank, n, command, ports)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[: len(TORCH_EXAMPLES)], ids=" ".join)
@on_ranks(3, 4, group=False)
def test_example_agrees_with_one_process_on_more_ranks(rank, n, command, ports):
    run_example(rank, n, command, ports)


@pytest.mark.slow
def test_example_runs_under_torchrun():
    check_output(torchrun(2, EXAMPLES / "ddp_digits.py", "--backend", BACKEND), 2)
