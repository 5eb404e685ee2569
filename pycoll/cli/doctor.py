"""`pycoll doctor`: shows which rank is late, and its stack."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pycoll.cli.common import console, new_table
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.observe.jobs import Group, Rank, Scan

EPILOG = """[bold]Examples[/bold]

  pycoll doctor                     # the jobs of this host

  pycoll doctor 4711                # the job of a process: the late rank and its Python stack

  pycoll doctor 4711 --stacks       # the stacks of all ranks

  pycoll doctor 4711 --dump /tmp/f  # the flight records of all ranks, for `pycoll trace`

  pycoll doctor 4711 --hosts a,b    # the ranks of both hosts, through ssh
"""


def doctor(
    target: Annotated[
        str | None, typer.Argument(help="A process id, or the beginning of a job's name.")
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show the stacks of all ranks, not only of late ones.")
    ] = False,
    patience_s: Annotated[
        float,
        typer.Option("--late", help="Seconds in one operation after which absent ranks are late."),
    ] = 1.0,
    dump: Annotated[
        Path | None, typer.Option("--dump", help="Write all flight records into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    hosts: Annotated[
        str | None,
        typer.Option(help="Hosts of the job, such as a,b: query each through ssh, as this user."),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(help="Command to use instead of ssh, with options. Also PYCOLL_SSH."),
    ] = None,
) -> None:
    """Show the operation of every rank of a running job, and the late rank's Python stack.

    The processes need not respond: their records are read from the memory that the ranks share.
    Only for a stack does the command send a process a signal, for which pycoll has a handler.
    """
    from pycoll.observe import jobs

    found = jobs.scan()
    if hosts is not None:
        if dump is not None:
            raise UsageError(
                "--dump writes the records of this host only: leave out --hosts and run it on each "
                "host"
            )
        found.groups = _of_hosts(hosts, ssh, found, target)
    groups = found.groups if target is None else _choose(found, target)
    if dump is not None:
        _dump(groups, dump)
    asked: dict[int | None, Rank] = {}
    for group in groups if target is not None else ():
        late = group.late(patience_s)
        for rank in group.ranks if stacks else late:
            if rank.host is not None:  # that host has taken the stack already
                continue
            if rank.pid in asked:  # the process has several ranks or communicators
                known = asked[rank.pid]
                rank.stack, rank.why_no_stack = known.stack, known.why_no_stack
            else:
                jobs.take_stack(rank)
                asked[rank.pid] = rank
    if as_json:
        typer.echo(json.dumps([_as_dict(group, patience_s) for group in groups], indent=2))
    elif target is None:
        _list(found, patience_s)
    else:
        shown: set[int | None] = set()
        for group in groups:
            _show(group, patience_s, shown, stacks)


def _of_hosts(hosts: str, ssh: str | None, found: Scan, target: str | None) -> list[Group]:
    """Returns the groups of all hosts. A process id is that of a process on this host."""
    from pycoll.observe import remote_doctor

    job = target
    if target is not None and target.isdecimal() and Path(f"/proc/{target}").is_dir():
        job = _choose(found, target)[0].job
    groups, silent = remote_doctor.ask(hosts, ssh, job)
    for text in silent:
        typer.echo(f"pycoll doctor: {text}", err=True)
    return groups


def _choose(found: Scan, target: str) -> list[Group]:
    """Returns the groups of the job of a process id or a name."""
    if target.isdecimal() and Path(f"/proc/{target}").is_dir():
        pid = int(target)
        jobs = {group.job for group in found.groups if pid in group.pids}
        if not jobs:
            raise UsageError(_why_not(pid))
    else:
        jobs = {group.job for group in found.groups if group.job.startswith(target)}
        if len(jobs) > 1:
            raise UsageError(
                f"ambiguous job name {target}: expected one of {', '.join(sorted(jobs))}"
            )
        if not jobs:
            what = f"no process {target}, and no job" if target.isdecimal() else "no job"
            raise UsageError(
                f"there is {what} that begins with {target}: pycoll doctor lists the jobs"
            )
    return [group for group in found.groups if group.job in jobs]


def _why_not(pid: int) -> str:
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        owner = os.stat(f"/proc/{pid}").st_uid
        return (
            f"process {pid} belongs to user {owner}, not to user {os.getuid()}: "
            "run pycoll doctor as that user, or as root"
        )
    return f"process {pid} has no communicator of pycoll; pycoll doctor lists those that have"


def _dump(groups: list[Group], folder: Path) -> None:
    from pycoll.observe import flight

    for group in groups:
        assert group.view is not None
        for path in flight.write(group.view, range(group.size), folder):
            typer.echo(f"wrote {path}", err=True)


def _as_dict(group: Group, patience_s: float) -> dict[str, Any]:
    late = group.late(patience_s)
    return {
        "job": group.job,
        "group": group.name,
        "size": group.size,
        "now_ns": group.now_ns,
        "failure": group.failure,
        "late": [rank.rank for rank in late],
        "ranks": [
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "host": rank.host,
                "is_here": rank.is_here,
                "state": rank.state,
                "late": rank in late,
                "sequence": rank.control["sequence"],
                "last": rank.last,
                "messages": rank.messages,
                "stack": rank.stack,
                "why_no_stack": rank.why_no_stack,
            }
            for rank in group.ranks
        ],
    }


def _list(found: Scan, patience_s: float) -> None:
    for text in found.unreadable:
        typer.echo(f"pycoll doctor: {text}", err=True)
    if not found.groups:
        hidden = (
            f"; {found.num_hidden} processes of other users were skipped"
            if found.num_hidden
            else ""
        )
        typer.echo(f"no process here has a communicator of pycoll{hidden}")
        return
    table = new_table("job", "communicators", "ranks", "pids", "state")
    for job in sorted({group.job for group in found.groups}):
        groups = [group for group in found.groups if group.job == job]
        pids = sorted({pid for group in groups for pid in group.pids})
        late = sorted({rank.rank for group in groups for rank in group.late(patience_s)})
        broken = any(group.failure for group in groups)
        verdict = "broken" if broken else f"late: {_list_of(late)}" if late else "no rank is late"
        table.add_row(
            job,
            str(len(groups)),
            str(max(group.size for group in groups)),
            _list_of(pids),
            verdict,
        )
    console().print(table)
    typer.echo("for details: pycoll doctor PID, or the beginning of a job's name")


def _show(group: Group, patience_s: float, shown: set[int | None], stacks: bool) -> None:
    late = group.late(patience_s)
    out = console()
    of_hosts = any(rank.host for rank in group.ranks)
    table = new_table(
        "rank",
        *(["host"] if of_hosts else []),
        *("pid", "state", "last operation", "called at"),
        title=group.name,
    )
    for column in table.columns[-2:]:
        column.justify = "left"
    for rank in group.ranks:
        table.add_row(
            str(rank.rank),
            *([rank.host or "-"] if of_hosts else []),
            "-" if rank.pid is None else str(rank.pid),
            rank.state + (", LATE" if rank in late else ""),
            _operation(rank, group.now_ns),
            (rank.newest or {}).get("site") or "-",
        )
    out.print(table)
    if group.failure:
        kind, culprit, reporter = (group.failure[key] for key in ("kind", "culprit", "reporter"))
        message = group.failure["message"]
        where = f", in {message.rstrip(',')}" if message else ""
        typer.echo(f"broken: {kind}, about rank {culprit}, noticed by rank {reporter}{where}")
    for rank in group.ranks:
        for pending in rank.pending:
            if pending is not rank.newest:
                what, for_s = _message(pending), _seconds(group.now_ns - pending["entered_ns"])
                typer.echo(
                    f"rank {rank.rank} has a pending {what}, for {for_s}, from {pending['site']}"
                )
    if late:
        typer.echo(f"late: rank {_list_of(map(_with_host, late))}")
    elif not group.failure:
        typer.echo("no rank is late")
    if any(rank.state == "elsewhere" for rank in group.ranks) and not of_hosts:
        typer.echo(
            "ranks in state elsewhere are on other hosts, shown as of this host's last query: "
            "--hosts a,b queries the hosts themselves"
        )
    for rank in group.ranks:
        if rank.pid is not None and rank.pid in shown and rank.host is None:
            continue
        if rank.host is not None and rank not in late and not stacks:
            continue
        if rank.stack:
            shown.add(rank.pid)
            who = f"{_with_host(rank)} (process {rank.pid})"
            typer.echo(f"\nPython stacks of rank {who}:\n{rank.stack}")
        elif rank.why_no_stack:
            typer.echo(f"no Python stack of rank {_with_host(rank)}: {rank.why_no_stack}")


def _with_host(rank: Rank) -> str:
    return f"{rank.rank} on host {rank.host}" if rank.host else str(rank.rank)


def _operation(rank: Rank, now_ns: int) -> str:
    if (last := rank.newest) is None:
        return "none yet"
    running = last["finished_ns"] is None
    since = _seconds(now_ns - (last["entered_ns"] if running else last["finished_ns"]))
    verb = "in" if running else "failed in" if last["failed"] else "finished"
    when = f"for {since}" if running else f"{since} ago"
    if "tag" in last:
        return f"{verb} {_message(last)}, {when}"
    return f"{verb} #{last['sequence']} {last['collective']}{last['shape']} {last['dtype']}, {when}"


def _message(record: dict[str, Any]) -> str:
    """Text for a message, as in error messages."""
    peer = "any rank" if record["peer"] is None else f"rank {record['peer']}"
    way = "to" if record["kind"] == "send" else "from"
    what = f"{record['count']} {record['dtype']}"
    return f"{record['kind']}({what}, tag {record['tag']}, {way} {peer})"


def _seconds(ns: int) -> str:
    return f"{max(0.0, ns / 1e9):.3g} s"


def _list_of(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
