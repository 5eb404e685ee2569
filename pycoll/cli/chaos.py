"""`pycoll chaos`: injects faults into an elastic training, and says what they cost."""

from __future__ import annotations

from typing import Annotated

import typer

from pycoll.cli.common import FAILED, ScriptArgument

EPILOG = """[bold]Examples[/bold]

  pycoll chaos examples/elastic_gpt.py --steps 60

  pycoll chaos --seed 7 --faults kill,stop,slow,disk -n 4 train.py

  pycoll chaos --seed 7 --count 20 --bits train.py
"""


def chaos(
    command: ScriptArgument,
    seed: Annotated[int, typer.Option(help="Chooses the faults; the same again for a seed.")] = 1,
    faults: Annotated[
        str,
        typer.Option(
            help="Kinds: kill; stop, for a while; slow, a tenth of the speed for a while; disk, on "
            "which no file grows for a while."
        ),
    ] = "kill,stop,slow",
    n: Annotated[int, typer.Option("-n", help="Number of ranks.", min=1)] = 4,
    count: Annotated[int, typer.Option(help="Number of faults.", min=1)] = 5,
    lasts: Annotated[
        float, typer.Option(help="Longest stop and the like, seconds.", min=0.0)
    ] = 0.3,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a run has failed.", min=1.0)
    ] = 600.0,
    bits: Annotated[
        bool,
        typer.Option("--bits", help="Fail also if bits of the weights differ (virtual_replicas)."),
    ] = False,
) -> None:
    """Run an elastic training twice, without and with faults, and compare the two.

    The script must use pc.elastic. The second run gets faults at commits and on ranks that follow
    from the seed; ranks that end are started again. Steps, stalls and weights are those that
    `job.commit()` of pc.elastic sees. Exit with 1 if a run fails, or more than one committed step
    is repeated.
    """
    from pycoll.chaos.faults import FAULTS
    from pycoll.chaos.notes import summary_of
    from pycoll.chaos.run import drawn, run

    kinds = [kind.strip() for kind in faults.split(",")]
    if "partition" in kinds:
        raise typer.BadParameter(
            f"--faults {faults}: partition needs several hosts, and these ranks are on one: they "
            "share memory; make campaign KINDS=training_partitions has hosts of its own, as root"
        )
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        raise typer.BadParameter(
            f"--faults {faults}: {unknown[0]!r} is none of {', '.join(FAULTS)}"
        )

    def say(text: str) -> None:
        typer.echo(f"pycoll chaos: {text}", err=True)

    say(f"{n} ranks, without faults")
    status, notes = run(command, n, [], say, timeout)
    calm = summary_of(notes)
    if status or calm.commits < 3 or not calm.digest:
        say(
            f"the script ended with status {status} after {calm.commits} commits, expected 0 after "
            "3 or more and equal weights on all ranks: it must train by pc.elastic(build, train)"
        )
        raise typer.Exit(FAILED)
    say(f"{calm.commits} commits in {calm.seconds:.2f} s; again, with faults of seed {seed}")
    status, notes = run(command, n, drawn(seed, kinds, count, calm.commits, lasts), say, timeout)
    found = summary_of(notes)
    equal = bool(found.digest) and found.digest == calm.digest
    goodput = calm.seconds / found.seconds if found.seconds else 0.0
    typer.echo(f"status        {status}, after {found.commits} of {calm.commits} commits")
    typer.echo(f"steps lost    at most {found.lost} committed ones, and the one that ran")
    typer.echo(
        f"stall         p50 {1e3 * found.stall_s(0.5):.0f} ms, "
        f"p99 {1e3 * found.stall_s(0.99):.0f} ms"
    )
    typer.echo(f"goodput       {goodput:.1%} of the run without faults")
    typer.echo(f"weights       bits {'equal' if equal else 'differ'}")
    is_over = status == 0 and found.commits == calm.commits and bool(found.digest)
    if not is_over or found.lost > 1 or (bits and not equal):
        say(
            f"failed; again: pycoll chaos --seed {seed} --faults {faults} -n {n} --count {count} "
            f"--lasts {lasts:g} {' '.join(command)}"
        )
        raise typer.Exit(FAILED)
