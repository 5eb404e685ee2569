"""MPIs for tests, and jobs of theirs on hosts that are network namespaces.

Looked for in this Python environment (`pip install mpich`) and in the prefixes that the variable
PYCOLL_TEST_MPI names, separated by colons (where wheels that overwrite each other are unpacked).
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from namespaces import Network, launcher_script

import pycoll
from pycoll import _core

ROOT = Path(pycoll.__file__).parents[1]
RANKS = Path(__file__).parent / "mpi_ranks.py"


@dataclass(frozen=True)
class Mpi:
    name: str  # mpich, impi
    prefix: Path

    @property
    def environment(self) -> dict[str, str]:
        """What its library needs that is not installed where it was built for."""
        found = {"LD_LIBRARY_PATH": str(self.prefix / "lib")}
        if self.name == "impi":
            return found | {"I_MPI_ROOT": str(self.prefix)}
        # UCX would see that the hosts are one machine, and go past the network.
        return found | {"UCX_TLS": "tcp,self"}


@functools.cache
def installed() -> dict[str, Mpi]:
    """By name."""
    found: dict[str, Mpi] = {}
    for prefix in [*os.environ.get("PYCOLL_TEST_MPI", "").split(":"), sys.prefix]:
        mpiexec, library = (Path(prefix) / f for f in ("bin/mpiexec.hydra", "lib/libmpi_abi.so.1"))
        if not prefix or not mpiexec.is_file() or not library.exists():
            continue
        text = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
        name = "impi" if "Intel" in text else "mpich"
        found.setdefault(name, Mpi(name, Path(prefix)))
    return found


def need(name: str) -> Mpi:
    """That MPI, or the test is skipped."""
    if not _core.mpi.facts()["abis"]:
        pytest.skip("this build of pycoll has no MPI: it found no mpi_abi.h (pip install mpich)")
    if name not in installed():
        wheel = {"mpich": "mpich", "impi": "impi-rt"}[name]
        pytest.skip(
            f"no {name} with the standard ABI: pip install {wheel}, or PYCOLL_TEST_MPI=prefix"
        )
    return installed()[name]


@dataclass(frozen=True)
class Job:
    status: int
    text: str

    def results(self) -> list[Any]:
        """What the ranks of mpi_ranks.py returned, in their order."""
        assert self.status == 0, self.text
        lines = [line for line in self.text.splitlines() if line.startswith("RESULT ")]
        found = dict(json.loads(line.removeprefix("RESULT ")) for line in lines)
        return [found[rank] for rank in sorted(found)]


def mpiexec(
    mpi: Mpi, network: Network, per_host: int, words: list[str], timeout_s: float = 100, **env: str
) -> Job:
    """Runs a program on `per_host` ranks of each host. Its launcher enters them as ssh would."""
    launcher = launcher_script(network)
    own = os.environ.get("PYTHONPATH", "")
    env = {"PYTHONPATH": f"{ROOT}:{own}", "OMP_NUM_THREADS": "1", **mpi.environment, **env}
    hosts = ",".join(network.address(host) for host in range(network.n))
    command = [str(mpi.prefix / "bin/mpiexec.hydra"), "-launcher", "rsh"]
    command += ["-launcher-exec", str(launcher), "-iface", "eth0", "-hosts", hosts]
    command += ["-ppn", str(per_host), "-n", str(network.n * per_host), *words]
    process = network.command(0, command, **env)
    try:
        text = process.communicate(timeout=timeout_s)[0]
        return Job(process.returncode, text)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text = process.communicate()[0]
        raise AssertionError(f"no end within {timeout_s} s: {text}") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        launcher.unlink()


def run(
    mpi: Mpi, network: Network, per_host: int, function: str, timeout_s: float = 100, **env: str
) -> list[Any]:
    """`function` of mpi_jobs.py on every rank. Returns what each returned."""
    words = [sys.executable, str(RANKS), function]
    return mpiexec(mpi, network, per_host, words, timeout_s, **env).results()


__all__ = ["Job", "Mpi", "installed", "mpiexec", "need", "run"]
