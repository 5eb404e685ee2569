"""The libraries that compare.py measures: what to install, how to start n ranks, what was set.

Each peer gets a throw-away environment of its own, so that none finds another's shared libraries.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
NUM_CORES = len(os.sched_getaffinity(0))


class PeerError(RuntimeError):
    """A peer that cannot be installed or started; the run goes on without it."""


@dataclass(frozen=True, slots=True)
class Library:
    """One library under test.

    Attributes:
        name: Key on the command line and in the JSON.
        adapter: Class of worker.py that calls it.
        packages: Packages for pip to install; empty for pycoll, which is already here.
        version_marker: The required start of its version string.
        launcher: The command of its bin folder that starts n ranks; None for plain processes.
        environment: Settings by environment variable, for n ranks.
        pin: Whether each rank pins itself; False where the launcher does it, or it is slower.
        build: Python code that is run once after pip, to compile what is compiled at first use.
        litter: Files that it leaves behind if it dies while starting, as a pattern of paths in
            which its own variables may stand.
    """

    name: str
    adapter: str
    packages: tuple[str, ...]
    version_marker: str
    launcher: Callable[[int], list[str]] | None = None
    environment: Callable[[int], dict[str, str]] = field(default=lambda n: {})
    pin: Callable[[int], bool] = field(default=lambda n: False)
    build: str = ""
    litter: str = ""

    def prefix(self, bench_dir: Path) -> Path:
        """The folder of its environment."""
        return bench_dir / self.name if self.packages else Path(sys.prefix)

    def commands(self, n: int, bench_dir: Path, address: str) -> list[tuple[list[str], dict]]:
        """Command lines, each with the variables to add, that start n ranks."""
        bin_dir = self.prefix(bench_dir) / "bin"
        pinned = "pin" if self.pin(n) else "free"
        # -I hides this folder and PYTHONPATH from a peer; pycoll may be found through the latter.
        alone = ["-I"] if self.packages else []
        worker = [str(bin_dir / "python"), *alone, str(WORKER), self.adapter, address, pinned]
        settings = self.environment(n) | self.paths(bench_dir)
        if self.launcher:
            program, *arguments = self.launcher(n)
            return [([str(bin_dir / program), *arguments, *worker], settings)]
        meeting = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        return [(worker, settings | meeting | {"RANK": str(rank)}) for rank in range(n)]

    def paths(self, bench_dir: Path) -> dict[str, str]:
        """Variables that keep what torch compiles, and the tools it compiles with, in prefix."""
        if not self.packages:
            return {}
        prefix = self.prefix(bench_dir)
        path = f"{prefix / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {"PATH": path, "TORCH_EXTENSIONS_DIR": str(prefix / "extensions")}

    def settings(self, n: int) -> dict[str, object]:
        """The settings for n ranks, for the record."""
        launcher = " ".join(self.launcher(n)) if self.launcher else "one process per rank"
        return {
            "launcher": launcher,
            "environment": self.environment(n),
            "pinned_by_worker": self.pin(n),
        }


def free_port() -> str:
    """A free TCP port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def single_threaded(n: int) -> dict[str, str]:
    """One thread calls MPI; with mpi4py's default, MPI_THREAD_MULTIPLE, it would take locks."""
    return {"MPI4PY_RC_THREAD_LEVEL": "single"}


def mpich_environment(n: int) -> dict[str, str]:
    """MPICH yields while it waits only with MPI_THREAD_MULTIPLE: a must if ranks share a core."""
    return single_threaded(n) if n <= NUM_CORES else {"MPI4PY_RC_THREAD_LEVEL": "multiple"}


def openmpi_launcher(n: int) -> list[str]:
    """One core per rank; more ranks than cores must be asked for, and then yield to wait."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    spread = ["--map-by", "core", "--bind-to", "core"]
    crowd = ["--map-by", "core:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"]
    return ["mpiexec", *root, *(spread if n <= NUM_CORES else crowd), "-n", str(n)]


def mpich_launcher(n: int) -> list[str]:
    """One core per rank; not by Hydra if ranks share a core.

    Hydra gives each rank a session, and Linux shares a core out among sessions (autogroups): a
    rank that yields does not let the other run, and every call takes milliseconds.
    """
    if n <= NUM_CORES:
        return ["mpiexec.hydra", "-bind-to", "core", "-n", str(n)]
    return ["mpiexec.gforker", "-n", str(n)]


def deepspeed_environment(n: int) -> dict[str, str]:
    """LOCAL_SIZE turns its shared memory on; more threads than cores would be in the way."""
    threads = str(max(1, NUM_CORES // n))
    return {"LOCAL_SIZE": str(n), "OMP_NUM_THREADS": threads, "DS_ACCELERATOR": "cpu"}


LIBRARIES = {
    library.name: library
    for library in (
        Library("pycoll", "pycoll", (), "pycoll", pin=lambda n: True),
        Library("pycoll_registered", "pycoll_registered", (), "pycoll", pin=lambda n: True),
        Library("pycoll_new", "pycoll_new", (), "pycoll", pin=lambda n: True),
        Library(
            "openmpi",
            "mpi",
            ("openmpi>=5,<6", "mpi4py>=4.1,<5", "numpy"),
            "Open MPI v5",
            launcher=openmpi_launcher,
            environment=single_threaded,
        ),
        Library(
            "mpich",
            "mpi",
            ("mpich>=5,<6", "mpi4py>=4.1,<5", "numpy"),
            "MPICH Version:      5",
            launcher=mpich_launcher,
            environment=mpich_environment,
            pin=lambda n: n > NUM_CORES,
        ),
        Library(
            "impi",
            "mpi",
            ("impi-rt", "mpi4py>=4.1,<5", "numpy"),
            "Intel(R) MPI Library",
            launcher=lambda n: ["mpiexec", "-n", str(n)],
            environment=lambda n: single_threaded(n) | {"I_MPI_FABRICS": "shm"},
        ),
        Library("gloo", "gloo", ("torch==2.13.0", "numpy"), "gloo"),
        Library(
            "deepspeed",
            "deepspeed",
            ("deepspeed==0.19.8", "torch==2.13.0", "numpy", "ninja", "setuptools"),
            "DeepSpeed 0.19",
            environment=deepspeed_environment,
            pin=lambda n: n <= NUM_CORES,
            build="from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Builder\n"
            "Builder().load()",
            litter="/dev/shm/deepspeed_allreduce_buffer_*_{MASTER_ADDR}_{MASTER_PORT}_*",
        ),
    )
}


def install(library: Library, bench_dir: Path) -> None:
    """Makes the library's environment, unless it is there already.

    Raises:
        PeerError: pip failed; the message holds the end of its output.
    """
    prefix = library.prefix(bench_dir)
    receipt = prefix / "installed.txt"
    wanted = "\n".join(library.packages)
    if receipt.exists() and receipt.read_text() == wanted:
        return
    venv.create(prefix, clear=True, with_pip=True)
    pip = [str(prefix / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input"]
    done = subprocess.run([*pip, *library.packages], capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"pip install {' '.join(library.packages)} failed:\n{done.stderr[-2000:]}")
    if library.build:
        command = [str(prefix / "bin" / "python"), "-I", "-c", library.build]
        settings = os.environ | library.environment(1) | library.paths(bench_dir)
        done = subprocess.run(command, capture_output=True, text=True, env=settings)
        if done.returncode:
            raise PeerError(f"compiling {library.name} failed:\n{done.stderr[-2000:]}")
    receipt.write_text(wanted)
