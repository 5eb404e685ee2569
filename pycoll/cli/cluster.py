"""`pycoll info --cluster`: the ranks of a job, their hosts, and the measured links between them."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import typer

_SMALL, _LARGE = 8, 1 << 20
_ROUNDS = 50


def cluster(as_json: bool, plot: Path | None) -> None:
    """Joins the ranks of the job; rank 0 prints their hosts and the measurements."""
    import pycoll

    if plot is not None:
        from pycoll.draw.style import image_format, matplotlib_module

        image_format(plot, None, ("svg", "png"))
        matplotlib_module()

    with pycoll.init() as comm:
        ranks = _gather(comm, _own_facts(comm))
        of_host: dict[int, list[int]] = {}  # by the host's number
        for rank, facts in enumerate(ranks):
            of_host.setdefault(facts["host_number"], []).append(rank)
        links = _measure(comm, list(of_host.values()))
        comm.barrier()
        if comm.rank != 0:
            return
        facts = {"transport": comm.transport, "ranks": ranks, "links": links}
        typer.echo(json.dumps(facts, indent=2) if as_json else _table(facts))
        if plot is not None:
            from pycoll.draw import draw_cluster

            draw_cluster(facts, plot)
            typer.echo(f"wrote {plot}", err=True)


def _own_facts(comm: Any) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "host_number": comm.host_number,
        "host_rank": comm.host_rank,
        "pid": os.getpid(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _gather(comm: Any, facts: dict[str, Any]) -> list[dict[str, Any]]:
    import numpy as np

    text = np.zeros(1024, np.uint8)
    data = json.dumps(facts).encode()[: text.size]
    text[: len(data)] = np.frombuffer(data, np.uint8)
    rows = comm.all_gather(text).reshape(comm.size, -1)
    return [json.loads(row.tobytes().rstrip(b"\0")) for row in rows]


def _measure(comm: Any, hosts: list[list[int]]) -> list[dict[str, Any]]:
    """Measures round trips, one pair of ranks at a time.

    The pairs are the first two ranks of each host, and the first ranks of every two hosts.
    """
    import numpy as np

    links = []
    pairs = [(ranks[0], ranks[1]) for ranks in hosts if len(ranks) > 1]
    pairs += [(a[0], b[0]) for i, a in enumerate(hosts) for b in hosts[i + 1 :]]
    for a, b in pairs:
        comm.barrier()
        times = np.zeros(2)
        if comm.rank in (a, b):
            times[:] = [_ping_pong(comm, a, b, nbytes) for nbytes in (_SMALL, _LARGE)]
        comm.broadcast(times, root=a)
        alpha_s = float(times[0])
        beta_s = max(float(times[1]) - alpha_s, 1e-12)
        links.append(
            {"from": a, "to": b, "alpha_us": alpha_s * 1e6, "gbit_per_s": _LARGE * 8e-9 / beta_s}
        )
    return links


def _ping_pong(comm: Any, a: int, b: int, nbytes: int) -> float:
    """Median one-way time, in seconds."""
    import numpy as np

    x = np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(_ROUNDS if nbytes == _SMALL else 8):
        start = time.perf_counter()
        if comm.rank == a:
            comm.send(x, b)
            comm.recv(x, b)
        else:
            comm.recv(x, a)
            comm.send(x, a)
        times.append((time.perf_counter() - start) / 2)
    return sorted(times)[len(times) // 2]


def _table(facts: dict[str, Any]) -> str:
    ranks, links = facts["ranks"], facts["links"]
    lines = [f"{len(ranks)} ranks, transport {facts['transport']}", ""]
    lines.append(f"{'rank':>4}  {'host':<20} {'place':>5} {'pid':>8} {'cores':>5}")
    for rank, of in enumerate(ranks):
        lines.append(
            f"{rank:>4}  {of['host']:<20} {of['host_rank']:>5} {of['pid']:>8} {of['cores']:>5}"
        )
    if links:
        lines += ["", f"{'between':<44} {'alpha':>10} {'bandwidth':>14}"]
    for link in links:
        ends = link["from"], link["to"]
        a, b = (f"{ranks[rank]['host']} (rank {rank})" for rank in ends)
        inside = len({ranks[rank]["host_number"] for rank in ends}) == 1
        between = (
            f"ranks {ends[0]} and {ends[1]} of {ranks[ends[0]]['host']}"
            if inside
            else (f"{a} and {b}")
        )
        lines.append(f"{between:<44} {link['alpha_us']:>7.1f} us {link['gbit_per_s']:>7.2f} Gbit/s")
    return "\n".join(lines)
