"""Building the shim: once for all ranks, never half, and found without an import of torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import pycoll
from pycoll import torch_build

pytestmark = pytest.mark.torch

ROOT = Path(pycoll.__file__).parents[1]
TORCH = torch_build.Torch(Path("/nowhere"), "0.0 of-tests")

# Notes each call, takes a while, and writes something in two halves.
COMPILER = """
    import pathlib, sys, time
    pathlib.Path({calls!r}).open("a").write("x")
    with open(sys.argv[sys.argv.index("-o") + 1], "w") as out:
        out.write("half ")
        out.flush()
        time.sleep({seconds})
        out.write("whole")
"""
ASK = """
    from pathlib import Path
    from pycoll import torch_build
    path = torch_build.find_or_build(torch_build.Torch(Path("/nowhere"), "0.0 of-tests"))
    assert path.read_text() == "half whole"
    print(path)
"""


def ask(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that wants the shim, with a compiler that takes so long."""
    script = folder / f"compiler{seconds}.py"
    calls = str(folder / "calls")
    script.write_text(textwrap.dedent(COMPILER.format(calls=calls, seconds=seconds)))
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ASK)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={
            **os.environ,
            "CXX": f"{sys.executable} {script}",
            "PYTHONPATH": str(ROOT),
            "PYCOLL_CACHE_DIR": str(folder / "cache"),
        },
    )


def test_several_ranks_that_ask_at_once_build_once(tmp_path):
    ranks = [ask(tmp_path, 0.5) for _ in range(4)]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    assert (tmp_path / "calls").read_text() == "x"
    assert sum("building the backend" in stderr for _, stderr in outputs) == 1
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left == {"_shim.lock", torch_build.file_name(TORCH, torch_build.source_folder())}


def test_killed_builder_leaves_no_lock_and_no_half_of_a_module(tmp_path):
    first = ask(tmp_path, 60)
    deadline = time.monotonic() + 20
    while not (tmp_path / "calls").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=20)
    second = ask(tmp_path, 0)
    stdout, stderr = second.communicate(timeout=30)
    assert second.returncode == 0, stderr
    assert (tmp_path / "calls").read_text() == "xx"
    assert len(list((tmp_path / "cache").iterdir())) == 2  # the lock, and the module


def test_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="building the torch backend failed"):
        torch_build.build(TORCH, torch_build.source_folder(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_that_cannot_be_written_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYCOLL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match="set PYCOLL_CACHE_DIR"):
        torch_build.find_or_build(TORCH)


def test_other_torch_or_other_sources_are_another_module(tmp_path):
    sources = torch_build.source_folder()
    name = torch_build.file_name(TORCH, sources)
    assert name != torch_build.file_name(torch_build.Torch(TORCH.folder, "0.1"), sources)
    shutil.copytree(sources / "torch", tmp_path / "torch")
    shutil.copytree(sources / "capi", tmp_path / "capi")
    assert name == torch_build.file_name(TORCH, tmp_path)
    (tmp_path / "capi" / "pycoll.h").write_text("another table")
    assert name != torch_build.file_name(TORCH, tmp_path)


def test_header_of_the_table_is_plain_c(tmp_path):
    source = tmp_path / "use.c"
    source.write_text('#include "capi/pycoll.h"\nint main(void) { return PYCOLL_OK; }\n')
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    command = [compiler, *flags, f"-I{torch_build.source_folder()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_info_tells_the_state_of_the_shim_without_torch():
    script = "import sys; from pycoll import torch_build; print(torch_build.state()); "
    script += "assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("built for torch")
