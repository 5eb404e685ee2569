"""`pycoll info`: features of this installation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

EPILOG = """[bold]Examples[/bold]

  pycoll info

  pycoll info --json

  pycoll info --env  # environment variables: values, defaults, what they do

  pycoll info --host  # cores per L3, NUMA node and socket

  pycoll info --host -o host.toml  # for pycoll simulate -t host.toml

  torchrun --nnodes 2 --nproc-per-node 4 ... -m pycoll info --cluster

  mpiexec -hosts a,b,c -n 12 pycoll info --cluster --plot cluster.svg
"""


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    of_cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Show the ranks of this job, their hosts, and measured links between the hosts. "
            "Run it on every rank, under the job's launcher.",
        ),
    ] = False,
    of_host: Annotated[
        bool,
        typer.Option("--host", help="Show this machine's cores by L3, NUMA node and socket."),
    ] = False,
    sysfs: Annotated[
        Path | None,
        typer.Option(
            "--sysfs", help="With --host, a copy of another machine's /sys/devices/system."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", help="With --host, write it as a topology for simulate: .toml."),
    ] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Show the environment variables that pycoll reads.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="With --cluster, a picture: .svg or .png.")
    ] = None,
) -> None:
    """Show the version, the build of the core, and the hardware and libraries of this machine."""
    if of_cluster:
        from pycoll.cli.cluster import cluster

        return cluster(as_json, plot)
    if plot is not None:
        from pycoll.errors import UsageError

        raise UsageError("--plot needs --cluster: it draws the links of a cluster")
    if of_host:
        return _host(as_json, sysfs, out)
    if sysfs is not None or out is not None:
        from pycoll.errors import UsageError

        raise UsageError("--sysfs and -o need --host: they read and write the domains of a host")
    if env:
        return _environment(as_json)
    facts = _facts()
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {_text(value)}")


def _host(as_json: bool, sysfs: Path | None, out: Path | None) -> None:
    """Prints the domains of this machine's usable cores, or of all cores of a copied sysfs."""
    from pycoll import topology

    own = os.sched_getaffinity(0)
    host = topology.read_host(sysfs) if sysfs else topology.read_host(cpus=own)
    if as_json:
        import dataclasses
        import json

        typer.echo(json.dumps(dataclasses.asdict(host), indent=2))
    else:
        typer.echo(host.describe())
    if out is not None:
        out.write_text(topology.dumps(host.topology()))
        typer.echo(f"wrote {out}", err=True)


def _environment(as_json: bool) -> None:
    """Prints the table of variables; raises for invalid values."""
    from pycoll import environment
    from pycoll.errors import UsageError

    rows = environment.table()
    if as_json:
        import dataclasses
        import json

        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        for row in rows:
            typer.echo(f"{row.name}={row.value}" if row.value else row.name)
            typer.echo(f"    {row.help}")
            typer.echo(f"    {row.expected}; default: {row.default}")
    for name in environment.unknown():
        typer.echo(f"warning: {name} is set, but pycoll reads no variable of that name", err=True)
    wrong = []
    for row in rows:
        try:
            environment.read(row.name)
        except UsageError as error:
            wrong.append(str(error))
    if wrong:
        raise UsageError("\n".join(wrong))


def _facts() -> dict[str, Any]:
    from pycoll import _core, schedule, torch_build

    facts: dict[str, Any] = {
        "pycoll": _version("pycoll") or "not installed, run from its source",
        "library": _core.__file__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }
    facts["tuning table"] = _core.tuning_table_note()
    facts |= {f"core: {name}": value for name, value in _core.build_info().items()}
    for package in ("numpy", "torch", "matplotlib"):
        facts[package] = _version(package) or "not installed"
    facts["MPI"] = _mpi_text()
    facts |= _device_facts()
    facts["torch backend"] = torch_build.state()
    for row in _core.collectives():
        if names := schedule.algorithms(row.name):
            facts[f"algorithms: {row.name}"] = names
    return facts


def _mpi_text() -> str:
    """Describes the MPI library that a job would use."""
    from pycoll import _core

    found = _core.mpi.facts()
    if not found["abis"]:
        return "this build has no MPI: no mpi_abi.h was found (pip install mpich)"
    built = f"built for the ABIs {found['abis']}"
    if not found["path"]:
        return f"{built}; no library found: set PYCOLL_MPI to its path"
    return f"{built}; library {found['path']} ({found['abi']})"


def _device_facts() -> dict[str, Any]:
    from pycoll import _core

    found = _core.device_info()
    facts: dict[str, Any] = {"device library": found["library"]}
    if built := found.get("built"):
        facts["device library"] += f" ({built})"
    if error := found.get("error"):
        facts["devices"] = f"none: {error}"
    for device in found["devices"]:
        capability = divmod(device["capability"], 10)
        text = f"{device['name']}, {device['bytes'] / 2**30:.1f} GiB"
        text += f", {device['processors']} processors"
        if any(capability):
            text += f", compute capability {capability[0]}.{capability[1]}"
        facts[f"device {device['index']}"] = text
    return facts


def _version(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
