"""Ranks that are forked after the imports: one process imports torch, and all ranks have it.

The child of a fork becomes what `python SCRIPT` would be: arguments, paths, streams, signals, exit
status. Invariant: nothing is forked that a fork breaks, such as threads or an initialised device.
"""

from __future__ import annotations

import ast
import atexit
import gc
import importlib
import io
import os
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

# What is imported before the fork if the script names the thing on the right.
MODULES = {
    "torch": "torch",
    "pycoll.parallel": "pycoll.parallel",
    "pycoll.torch": "pycoll.torch",
    "torch._dynamo": "optim",  # torch imports its compiler when the first optimizer is made
}


def modules_of(command: list[str], is_module: bool) -> list[str]:
    """The modules of `MODULES` that a script, or a module, names; none if it cannot be read.

    Args:
        command: The script, or the module's name, and its arguments.
        is_module: Whether it is a module, as for `python -m`.
    """
    try:
        named = set(_named(ast.parse(_source(command[0], is_module))))
    except (OSError, SyntaxError, ValueError):
        return []  # the rank itself says what is wrong
    if "torch" not in {name.partition(".")[0] for name in named} and not (
        named & {"pycoll.parallel", "pycoll.torch"}
    ):
        return []
    return [module for module, sign in MODULES.items() if sign in named]


def import_all(modules: list[str], environment: Mapping[str, str]) -> str:
    """Imports modules into this process.

    Args:
        modules: Names.
        environment: Variables of all ranks, which libraries read when they are imported.

    Returns:
        The reason why ranks cannot be forked from this process; empty if they can.
    """
    os.environ.update(environment)
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        return f"{module} cannot be imported ({type(error).__name__})"
    return _broken_by_fork()


def run(command: list[str], is_module: bool, environment: Mapping[str, str]) -> int:
    """Runs the script as the main module of this forked process; returns its exit status."""
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout = sys.__stdout__ = _unbuffered(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _unbuffered(2)  # type: ignore[misc]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all ranks would draw the same numbers
    sys.argv[:] = command
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else str(Path(command[0]).resolve().parent)
    status = 0
    try:
        if is_module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except BaseException as error:
        status = _status_of(error)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    return status


def _source(name: str, is_module: bool) -> str:
    if not is_module:
        return Path(name).read_text()
    base = Path(*name.split("."))
    tails = (base.with_suffix(".py"), base / "__main__.py")
    # Finding the module by importlib would run the packages around it.
    for folder in (os.getcwd(), *sys.path):
        for path in (Path(folder) / tail for tail in tails):
            if path.is_file():
                return path.read_text()
    raise OSError(name)


def _named(tree: ast.AST) -> Iterator[str]:
    """Modules that a program imports, with all their parents, and the attributes that it uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _with_parents(node.module)
            for alias in node.names:
                yield from (f"{node.module}.{alias.name}", alias.name)
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
    yield parts[-1]


def _broken_by_fork() -> str:
    """What of this process a fork would break; empty if nothing."""
    # Libraries that allow for forks end their threads before one (OpenBLAS), so that none is left.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads; they are counted here
        if not (pid := os.fork()):
            os._exit(0)
    os.waitpid(pid, 0)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"{num_threads} threads run after the imports, and a fork has one"
    if sys.gettrace() is not None:
        return "a debugger traces this process"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports have initialised CUDA, which does not survive a fork"
    gc.freeze()  # the pages of what is imported stay shared between the ranks
    return ""


def _unbuffered(fd: int) -> io.TextIOWrapper:
    """The stream that Python makes under PYTHONUNBUFFERED."""
    before = sys.stdout if fd == 1 else sys.stderr
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115  (open as long as the process)
    return io.TextIOWrapper(
        raw, before.encoding, before.errors, line_buffering=True, write_through=True
    )


def _status_of(error: BaseException) -> int:
    """Ends an uncaught exception as Python does; returns the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    error = error.with_traceback(_of_the_script(error.__traceback__))
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """The frames from the script on: without those of this module and of runpy."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


__all__ = ["MODULES", "import_all", "modules_of", "run"]
