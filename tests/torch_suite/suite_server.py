"""Runs torch's own distributed tests with a backend of our choice: no file of torch is copied.

The test classes that ship inside the torch wheel decide by the backend's name, as their module is
imported, which tests exist. The module is therefore imported under a *guise*, the name of a backend
that it knows ("gloo"), so that the very tests which torch runs for that backend exist; then its
name of the backend is replaced, so that the bodies run with ours.

A start of Python and torch costs seconds, most tests take milliseconds. So one process imports
everything, and forks a process per test that forks the ranks: every test has fresh processes.

Reads names of tests from standard input, one per line; writes one line of JSON per result.

A *view* is a guise and whether GPUs are the CPU (`cuda_as_cpu.py`): see VIEWS.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
import unittest
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

TEST_SECONDS = 240  # torch's own limit is 300 to 500
LOG_BYTES = 6000

# Name: guise, GPUs are the CPU. A test is looked at in the first view in which Gloo passes it.
VIEWS = {
    "gloo": ("gloo", False),  # what torch runs for Gloo on this machine
    "gloo on GPUs": ("gloo", True),  # what it would run for Gloo with GPUs: most of DDP
    "mpi": ("mpi", False),  # what it keeps for MPI: all_to_all
    "nccl on GPUs": ("nccl", True),  # what it keeps for NCCL: collectives of tensors, batches
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a test: "pass", "skip" or "fail", why, and what its processes printed last."""

    name: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    log: str = ""


def load_suite(backend: str, view: str, world_size: int) -> type:
    """The class of torch's tests, at run time derived for this backend and forked ranks."""
    guise, cuda_as_cpu = VIEWS[view]
    folder = tempfile.gettempdir()
    os.environ.update(
        BACKEND=guise,
        WORLD_SIZE=str(world_size),
        # Tests of timeouts exist only with a file; setUp names another one for every test.
        INIT_METHOD=f"file://{folder}/init",
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",  # its pool of processes is none for forks
    )
    import torch
    from torch import distributed
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)
    # "small" is below 8 ranks there, and was chosen for machines with 4 GPUs.
    common_distributed.skip_if_small_worldsize = lambda test: test
    if cuda_as_cpu:
        import cuda_as_cpu as stand_in

        stand_in.let_tests_without_a_gpu_in(common_distributed)
    available = f"is_{guise}_available"
    with mock.patch.object(distributed, available, lambda: True):
        from torch.testing._internal.distributed import distributed_test

    if backend == "pycoll":
        import pycoll.torch  # noqa: F401
    take_the_guise_off(distributed_test, backend, guise)
    return derive(distributed_test, stand_in.CudaAsCpu if cuda_as_cpu else None)


class BackendOfCpu(str):
    """A name that bodies of tests take for Gloo's and MPI's: they choose CPU tensors by them."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other in ("gloo", "mpi")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def take_the_guise_off(module: ModuleType, backend: str, guise: str) -> None:
    """From here on the module, its lists and the environment name our backend."""
    module.BACKEND = BackendOfCpu(backend)
    os.environ["BACKEND"] = backend
    for name in dir(module):
        if name.endswith("PROFILING_SUPPORTED_BACKENDS"):
            getattr(module, name).append(backend)
    cases = module.DistTestCases
    for names in (*cases.skip_collective.values(), *cases.backend_feature.values()):
        if guise in names:
            names.add(backend)
    cases.backend_feature["plugin"].add(backend)


def derive(module: ModuleType, device_stand_in: Any) -> type:
    """torch's classes with ranks that are forked and a barrier that does not poll."""

    class TorchSuite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            context = multiprocessing.get_context("fork")
            TorchSuite.all_ranks = context.Barrier(int(self.world_size))
            self._start_processes(context.Process)

        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            """Between processes as torch's, which sleeps 0.1 s at a time."""
            assert wait_for in (None, int(self.world_size))
            TorchSuite.all_ranks.wait(timeout)

        def _join_processes(self, test: Any) -> None:
            """Waits without polling; torch's loop then has nothing to wait for."""
            running = {process.sentinel: process for process in self.processes}
            while running:
                ended = [running.pop(x) for x in multiprocessing.connection.wait(list(running))]
                if any(process.exitcode == self.TEST_ERROR_EXIT_CODE for process in ended):
                    break
            super()._join_processes(test)

        def test_ddp_logging_data_cpu(self) -> None:
            """torch logs every backend that it does not ship as "custom"."""
            is_ours = str(module.BACKEND) not in ("gloo", "mpi", "nccl", "ucc", "xccl")
            name = "custom" if is_ours else str(module.BACKEND)
            with mock.patch.object(module.dist, "get_backend", lambda *_: name):
                super().test_ddp_logging_data_cpu()

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            end_with_the_parent()
            if device_stand_in is None:
                super()._run(*args, **kwargs)
            with device_stand_in(str(module.BACKEND)):
                super()._run(*args, **kwargs)

    return TorchSuite


def end_with_the_parent() -> None:
    """No test outlives the server, no rank its test, however either ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run_one(suite: type, name: str) -> Outcome:
    """In a process of its own."""
    result = unittest.TestResult()
    start = time.monotonic()
    try:
        unittest.TestSuite([suite(name)]).run(result)
    except Exception as error:  # of torch's fixtures
        return Outcome(name, "fail", repr(error))
    seconds = round(time.monotonic() - start, 2)
    for _, reason in result.skipped:
        return Outcome(name, "skip", reason, seconds)
    for _, text in [*result.failures, *result.errors]:
        return Outcome(name, "fail", text, seconds)
    return Outcome(name, "pass", "", seconds)


class Job:
    """One test that runs: its process, the end of its pipe and the file of what it prints."""

    def __init__(self, suite: type, name: str) -> None:
        self.name = name
        self.started_s = time.monotonic()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.receiver, sender = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            end_with_the_parent()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(self.log.fileno(), 1)
            os.dup2(self.log.fileno(), 2)
            outcome = run_one(suite, name)
            sys.stdout.flush()
            os.write(sender, json.dumps(asdict(outcome)).encode())
            os._exit(0)
        os.close(sender)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def finish(self, overdue: bool) -> Outcome:
        """What came of it; ends what still runs of it."""
        if overdue:
            self.end()
        text = b""
        while not overdue and (part := os.read(self.receiver, 1 << 16)):
            text += part
        os.waitpid(self.pid, 0)
        self.end()  # ranks that it forgot
        os.close(self.receiver)
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - LOG_BYTES))
        log = self.log.read().decode(errors="replace")
        self.log.close()
        if overdue:
            return Outcome(
                self.name, "fail", f"still ran after {TEST_SECONDS} s", TEST_SECONDS, log
            )
        if not text:
            return Outcome(self.name, "fail", "the process of the test died", 0.0, log)
        outcome = json.loads(text)
        return Outcome(**{**outcome, "log": log if outcome["outcome"] == "fail" else ""})


def serve(suite: type, num_jobs: int) -> None:
    """Tests in the order of their names, several at a time; results as they come."""
    jobs: dict[int, Job] = {}
    try:
        _serve(suite, num_jobs, jobs)
    finally:
        for job in jobs.values():
            job.end()


def _serve(suite: type, num_jobs: int, jobs: dict[int, Job]) -> None:
    names: list[str] = []
    selector = selectors.PollSelector()  # standard input may be a file
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    pending, open_input = "", True
    while open_input or names or jobs:
        while names and len(jobs) < num_jobs:
            job = Job(suite, names.pop(0))
            jobs[job.receiver] = job
            selector.register(job.receiver, selectors.EVENT_READ)
        ready = {key.fd for key, _ in selector.select(timeout=1)}
        if open_input and sys.stdin.fileno() in ready:
            text = os.read(sys.stdin.fileno(), 1 << 16).decode()
            open_input = bool(text)
            if not open_input:
                selector.unregister(sys.stdin.fileno())
            *lines, pending = (pending + text).split("\n")
            names += lines
        for fd, job in list(jobs.items()):
            overdue = time.monotonic() - job.started_s > TEST_SECONDS
            if fd in ready or overdue:
                selector.unregister(fd)
                del jobs[fd]
                print(json.dumps(asdict(job.finish(overdue and fd not in ready))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="pycoll")
    parser.add_argument("--view", default="gloo", choices=VIEWS)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the names of the tests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torch_suite_", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        server = os.getpid()

        def end(*_: object) -> None:
            # An exception could be swallowed: some imports and hooks of fork ignore all of them.
            if os.getpid() == server:
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

        signal.signal(signal.SIGTERM, end)
        suite = load_suite(args.backend, args.view, args.world_size)
        if args.list:
            print("\n".join(sorted(unittest.TestLoader().getTestCaseNames(suite))))
        else:
            serve(suite, args.jobs)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
