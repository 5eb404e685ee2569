"""`pycoll run` with ranks that are forked after the imports: nothing else differs for a script.

A small package stands in for torch, so that imports take no time; it counts them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command_line import run, start
from processes import wait_for_pids, wait_until_gone

from pycoll.launch.preloaded import modules_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

TORCH = """
import os, pathlib
pathlib.Path(os.environ["IMPORTS"], str(os.getpid())).touch()
omp_num_threads = os.environ.get("OMP_NUM_THREADS")
class cuda:
    is_initialized = staticmethod(lambda: bool(os.environ.get("INITIALIZED")))
if os.environ.get("THREADS"):
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
SEES = """
import atexit, json, os, signal, sys, threading, time
import numpy as np
import torch
import beside

class Here:
    pass

print(json.dumps([sys.argv, __name__, __file__, sys.path[0], Here.__module__, beside.text]))
print(sys.modules["__main__"].__dict__ is globals(), torch.omp_num_threads)
print([os.environ[name] for name in ("RANK", "WORLD_SIZE")], os.getpgid(0) == os.getpid())
names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE")
print([str(signal.getsignal(getattr(signal, name))) for name in names])
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), sys.stdin.read() == "", sys.stdout.isatty())
fds = [f"/proc/self/fd/{fd}" for fd in range(64)]
print([os.readlink(fd).partition(":")[0] for fd in fds if os.path.exists(fd)])
print("to stderr", file=sys.stderr)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
print("end", end="")
"""
ENDS = """
import os, signal, sys, torch
def end():
    if sys.argv[1] == "raise":
        raise ValueError("the cause")
    if sys.argv[1] == "interrupt":
        raise KeyboardInterrupt
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
if os.environ["RANK"] == "1":
    end()
"""


class Folder:
    """A folder with a script, a module beside it, and the package that stands in for torch."""

    def __init__(self, path: Path) -> None:
        self.path, self.imports = path, path / "imports"
        for name, text in (("torch/torch.py", TORCH), ("beside.py", "text = 'beside'")):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(text)
        self.imports.mkdir()

    def run(self, text: str, *args: str, options=(), status=0, **more: str):
        """The sorted lines of both streams, and the number of imports of torch."""
        (self.path / "script.py").write_text(text)
        for found in self.imports.iterdir():
            found.unlink()
        command = (*options, str(self.path / "script.py"), *args)
        streams = run("run", "-n", "3", "--grace", "0.5", *command, status=status, **self.env(more))
        return *(sorted(text.splitlines()) for text in streams), len(list(self.imports.iterdir()))

    def env(self, more):
        path = os.pathsep.join([str(self.path / "torch"), os.environ.get("PYTHONPATH", "")])
        return {"PYTHONPATH": path, "IMPORTS": str(self.imports), **more}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_script_sees_the_same_whether_ranks_are_forked_or_not(folder):
    *forked, imports = folder.run(SEES, "-n", "9")
    *executed, each = folder.run(SEES, "-n", "9", options=("--no-preload",))
    assert forked == executed
    assert (imports, each) == (1, 3)
    assert sum(line.endswith("of a thread") for line in forked[0]) == 3


ENDINGS = {"7": 7, "kill": 128 + signal.SIGKILL}
MORE_ENDINGS = {"a text": 1, "raise": 1, "interrupt": 128 + signal.SIGINT}


@pytest.mark.parametrize(
    ("way", "status"),
    [*ENDINGS.items(), *(pytest.param(*e, marks=pytest.mark.slow) for e in MORE_ENDINGS.items())],
)
def test_script_ends_the_same_whether_ranks_are_forked_or_not(folder, way, status):
    _, forked, imports = folder.run(ENDS, way, status=status)
    _, executed, _ = folder.run(ENDS, way, status=status, options=("--no-preload",))
    assert forked == executed
    assert imports == 1


def test_ranks_that_are_forked_draw_different_numbers(folder):
    text = "import random, torch, numpy as np\nprint(random.random(), np.random.rand())"
    out, _, imports = folder.run(text)
    for column in (1, 2):
        assert len({line.split()[column] for line in out}) == 3
    assert imports == 1


def test_module_runs_as_main_in_forked_ranks(folder, monkeypatch):
    package = folder.path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys, torch\nprint(__name__, __package__, sys.argv)")
    monkeypatch.chdir(folder.path)
    out, _ = run("run", "-n", "2", "-m", "package.train", "x", **folder.env({}))
    expected = f"__main__ package ['{package / 'train.py'}', 'x']"
    assert sorted(out.splitlines()) == [f"[{rank}] {expected}" for rank in range(2)]
    assert len(list(folder.imports.iterdir())) == 1


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ("THREADS", "2 threads run after the imports"),
        ("INITIALIZED", "the imports have initialised CUDA"),
    ],
)
def test_imports_that_a_fork_would_break_are_done_by_each_rank(folder, variable, reason):
    out, err, imports = folder.run("import torch\nprint(1)", **{variable: "1"})
    assert out == ["[0] 1", "[1] 1", "[2] 1"]
    assert any(reason in line for line in err)
    assert imports == 4


def test_one_rank_and_scripts_without_torch_are_not_forked(folder):
    assert folder.run("print(1)")[2] == 0
    (folder.path / "script.py").write_text("import torch, os\nprint(os.getpid())")
    out, _ = run("run", "-n", "1", "--no-prefix", str(folder.path / "script.py"), **folder.env({}))
    assert [path.name for path in folder.imports.iterdir()] == [out.strip()]


def test_command_that_is_killed_leaves_no_forked_rank(folder):
    (folder.path / "script.py").write_text(
        "import os, pathlib, sys, time, torch\n"
        "pathlib.Path(sys.argv[1], 'rank' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(1000)\n"
    )
    files = folder.path / "pids"
    files.mkdir()
    command = ("run", "-n", "3", str(folder.path / "script.py"), str(files))
    started = start(*command, **folder.env({}))
    pids = wait_for_pids(files, 3)
    started.kill()
    started.communicate(timeout=30)
    wait_until_gone(pids)


@pytest.mark.pure
def test_modules_are_found_in_the_text_of_a_script(tmp_path):
    path = tmp_path / "script.py"
    for text, expected in (
        ("import numpy", []),
        ("from torchvision import models", []),
        ("def main():\n    from torch import nn", ["torch"]),
        ("import torch.distributed as dist\nx = dist.optim", ["torch", "torch._dynamo"]),
        ("from pycoll import parallel as pc", ["pycoll.parallel"]),
        ("import torch, pycoll.torch", ["torch", "pycoll.torch"]),
        ("import (", []),
    ):
        path.write_text(text)
        assert modules_of([str(path)], False) == expected, text
    assert modules_of([str(tmp_path / "missing.py")], False) == []
    assert modules_of(["no.such.module"], True) == []
