"""Ranks with different versions of pycoll, or different memory layouts, refuse to form a world."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hostile_rank import HostileRank, build_record
from namespaces import TOKEN, free_port

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

OTHER = "9.9" + pycoll.__version__[3:]  # as long as the own one
INIT = """
import json, pycoll
try:
    comm = pycoll.init(timeout_s=20)
    report = "joined"
except pycoll.Error as error:
    report = f"{type(error).__name__}: {error}"
print(json.dumps(report))
"""
GROW = """
import json, os, sys, pycoll
try:
    if "RANK" in os.environ:
        pycoll.init(timeout_s=20).grow(1, sys.argv[1], 20)
    else:
        pycoll.join(sys.argv[1], 20)
    report = "joined"
except pycoll.Error as error:
    report = f"{type(error).__name__}: {error}"
print(json.dumps(report))
"""
TORCH = """
import json, os, torch.distributed as dist, pycoll
try:
    dist.init_process_group("pycoll")
    dist.barrier()
    report = "joined"
except Exception as error:
    report = f"{type(error).__name__}: {error}"
print(json.dumps(report), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def other_version(tmp_path_factory) -> Path:
    """A folder with a copy of pycoll whose core says that it is version OTHER."""
    folder = tmp_path_factory.mktemp("other")
    package = Path(pycoll.__file__).parent
    shutil.copytree(package, folder / "pycoll", symlinks=True)
    shutil.copy(package.parent / "_pycoll_torch.py", folder)
    (folder / "csrc").symlink_to(package.parent / "csrc")  # the backend for torch is found by it
    (core,) = folder.glob("pycoll/_core*.so")
    binary = core.read_bytes()
    # The compiler keeps a short text in its instructions, four bytes at a time.
    own, other = pycoll.__version__[:4].encode(), OTHER[:4].encode()
    assert own in binary and pycoll.__version__[4:] == OTHER[4:]
    core.write_bytes(binary.replace(own, other))
    return folder


def start(program: str, *words: str, folder: Path | None = None, **env: str) -> subprocess.Popen:
    paths = [folder or Path(pycoll.__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


def reports(ranks: Sequence[subprocess.Popen]) -> list[str]:
    """What the ranks have printed; all ranks have ended."""
    try:
        return [json.loads(rank.communicate(timeout=60)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def world(size: int, port: int) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**place, "WORLD_SIZE": str(size), "PYCOLL_TOKEN": TOKEN, "PYCOLL_IFNAME": "lo"}


def check(found: list[str], rank: int) -> None:
    """All ranks raise the same error, which names the version of `rank` and that of rank 0."""
    (text,) = set(found)
    assert text.startswith(f"UsageError: rank {rank} on host "), text
    assert f" has pycoll {OTHER} with memory layout " in text, text
    assert f", and rank 0 on host {os.uname().nodename} has pycoll {pycoll.__version__} " in text
    assert text.endswith(": install the same pycoll for all ranks"), text


def test_rank_with_another_version_is_named_on_every_rank(other_version):
    env = world(3, free_port())
    ranks = [start(INIT, RANK=str(rank), **env) for rank in range(2)]
    ranks.append(start(INIT, folder=other_version, RANK="2", **env))
    check(reports(ranks), 2)


@pytest.mark.slow
def test_newcomer_with_another_version_is_named_on_every_rank(other_version):
    """Slow: starts three processes, as the test above does."""
    env, address = world(2, free_port()), f"127.0.0.1:{free_port()}"
    ranks = [start(GROW, address, RANK=str(rank), **env) for rank in range(2)]
    ranks.append(start(GROW, address, folder=other_version, PYCOLL_TOKEN=TOKEN))
    check(reports(ranks), 2)


@pytest.mark.torch
@pytest.mark.slow
def test_rank_with_another_version_in_a_group_of_torch_is_named_on_every_rank(other_version):
    """Slow: starts torch in two processes."""
    env = world(2, free_port())
    ranks = [start(TORCH, RANK="0", **env), start(TORCH, folder=other_version, RANK="1", **env)]
    found = reports(ranks)
    assert len(set(found)) == 1 and f"rank 1 on host {os.uname().nodename}" in found[0], found
    assert f"has pycoll {OTHER} with memory layout" in found[0], found


class Leaver(HostileRank):
    """Leaves when it has said which pycoll it runs."""

    def _exchange(self, topic: str, own: bytes | str) -> list[bytes]:
        if topic == "offers":
            raise EOFError
        return super()._exchange(topic, own)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build, text",
    [
        (
            build_record(layout="5.00000000"),
            f"rank 2 on host hostile has pycoll {pycoll.__version__} with memory layout "
            "5.00000000, and rank 0 on host ",
        ),
        (build_record(version="1\x1b[2J"), "rank 2 on host hostile has pycoll 1\\x1b[2J with"),
        (b"\7\0\0\0old/net", "rank 2 has a pycoll that does not send its version, and rank 0 on"),
    ],
)
def test_rank_of_another_host_with_another_layout_is_named_on_every_rank(build, text):
    """Slow: starts two processes for each case."""
    port = free_port()
    ranks = [start(INIT, RANK=str(rank), **world(3, port)) for rank in range(2)]
    with contextlib.suppress(EOFError):
        Leaver(port, TOKEN, 3, build)
    found = reports(ranks)
    assert found[0] == found[1]
    assert found[0].startswith(f"UsageError: {text}"), found[0]
