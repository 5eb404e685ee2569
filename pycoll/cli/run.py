"""`pycoll run`: runs a script on n ranks on one or more hosts. No rank outlives the command."""

from __future__ import annotations

import math
import os
import sys
from typing import Annotated

import typer

from pycoll.cli.common import check_script

EPILOG = """[bold]Examples[/bold]

  pycoll run -n 4 train.py --epochs 3

  pycoll run -n 2 -m my_package.train

  pycoll run -n 4 --no-prefix train.py

  pycoll run -n 4 --no-preload train.py

  pycoll run --mesh dp=2,tp=2,pp=2 train.py

  pycoll run -n 4 --replicas local:steps=50,compress=int8 train.py

  pycoll run -n 4 --hosts a,b train.py

  pycoll run --elastic 2:4 train.py
"""

CONTEXT = {"allow_interspersed_args": False}  # options after SCRIPT belong to the script


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")
    ],
    n: Annotated[int | None, typer.Option("-n", help="Number of ranks; default 2.", min=1)] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Axes of pycoll.parallel, such as dp=2,tp=2,pp=2: overrides the script's mesh, "
            "and sets the number of ranks where -n is not given."
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="How replicas of pycoll.parallel stay together: allreduce, gossip, local or ps, "
            "with options such as local:steps=50: overrides the script's replicas."
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Hosts, such as a,b: each starts its share of the ranks through ssh. This Python, "
            "pycoll and the script must have the same paths there, and all hosts must reach the "
            "first host by its name."
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(
            help="Command to use instead of ssh, with options: gets a host and a command line. "
            "Also PYCOLL_SSH."
        ),
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="For scripts with pc.elastic: starts MAX ranks, starts those that end again, and "
            "goes on while MIN are left. Sets PYCOLL_ELASTIC and PYCOLL_JOIN.",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="With --elastic: how often ranks are started again.", min=0)
    ] = 10,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")
    ] = False,
    prefix: Annotated[
        bool, typer.Option("--prefix/--no-prefix", help="Start each line of output with the rank.")
    ] = True,
    preload: Annotated[
        bool,
        typer.Option(
            "--preload/--no-preload",
            help="Import torch once, if the script imports it, and fork the ranks afterwards. "
            "Variables that libraries read when they are imported must be set before.",
        ),
    ] = True,
    grace: Annotated[
        float,
        typer.Option(
            help="Seconds from the first failure to SIGTERM for the other ranks, and from SIGTERM "
            "to SIGKILL.",
            min=0.0,
        ),
    ] = 5.0,
) -> None:
    """Run a Python script on n ranks; exit with the status of the first rank that fails.

    The command sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and PYCOLL_TOKEN for
    each rank; `pycoll.init()` reads them.
    """
    from pycoll.launch.elastic_script import ElasticLaunch
    from pycoll.launch.processes import World
    from pycoll.launch.script import Launch, RemoteLaunch

    extra = {}
    if mesh is not None:
        from pycoll.parallel.core.mesh_sizes import infer_sizes, parse_sizes

        sizes = parse_sizes(mesh)
        n = math.prod(infer_sizes(sizes, n or math.prod(sizes.values())).values())
        extra["PYCOLL_MESH"] = mesh
    if replicas is not None:
        extra["PYCOLL_REPLICAS"] = replicas
    least = 0
    if elastic is not None:
        from pycoll.elastic.owner_port import free_address

        least, n = _fewest_and_most(elastic)
        if hosts is not None:
            raise typer.BadParameter(
                "--elastic starts ranks on this host; on others, start processes with "
                "PYCOLL_JOIN=1 and the same PYCOLL_ELASTIC and PYCOLL_TOKEN"
            )
        extra["PYCOLL_ELASTIC"] = os.environ.get("PYCOLL_ELASTIC") or free_address("127.0.0.1")
    if not module and hosts is None:
        check_script(command)
    n = 2 if n is None else n
    if n > 1 and "OMP_NUM_THREADS" not in os.environ:
        extra["OMP_NUM_THREADS"] = "1"
        typer.echo(
            f"pycoll run: OMP_NUM_THREADS=1 for each of {n} ranks; set it to use more threads",
            err=True,
        )
    argv = [sys.executable, *(["-m"] if module else []), *command]
    if hosts is None:
        if elastic is None:
            launch = Launch(argv, World(n), extra, prefix, grace)
        else:
            launch = ElasticLaunch(
                argv, World(n), extra, prefix, grace, least=least, restarts=restarts
            )
        if preload and n > 1:
            launch.preload(command, module)
        raise typer.Exit(launch.run())
    from pycoll.errors import UsageError
    from pycoll.launch.remote_hosts import Hosts

    try:
        world = Hosts.parse(hosts, n, ssh)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(RemoteLaunch(argv, world, extra, prefix, grace).run())


def _fewest_and_most(text: str) -> tuple[int, int]:
    """Reads "2:4"."""
    least, colon, most = text.partition(":")
    if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise typer.BadParameter(f"--elastic {text}: expected MIN:MAX, such as 2:4")
    return int(least), int(most)
