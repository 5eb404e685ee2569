"""A timeline of all ranks: compute, waiting times, and collectives.

It is in the Trace Event format, for ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.object_collectives import gather_objects

_TRACKS = ("steps", "compute", "bubble", "communication")


@contextmanager
def trace(mesh: Mesh, path: str | Path) -> Iterator[None]:
    """Writes a timeline of the steps within the context. Collective.

    Each rank is a process with tracks for its steps, its compute (forward, backward and optimizer,
    or the actions of its pipeline stage), its bubbles, its waits, and for each axis the collectives
    that the core recorded, from entry to end: collectives that overlap with compute appear below
    it.

    Args:
        mesh: The ranks.
        path: The file that rank 0 writes: a picture where it ends in .svg or .png, else JSON.

    Cost: a few hundred nanoseconds per span; at the end one exchange of all events. Only the last
    1,024 collectives of each axis are kept.
    """
    mesh.world.barrier()
    mesh.ledger.settle()
    before, mesh.ledger.spans = mesh.ledger.spans, []
    try:
        yield
    finally:
        mesh.ledger.settle()
        spans, mesh.ledger.spans = mesh.ledger.spans, before
    first_ns = min((span[2] for span in spans), default=0)
    operations = [op for axes in mesh.planes for op in _operations(mesh, axes, first_ns)]
    mine = {
        "rank": mesh.world.rank,
        "place": mesh.place,
        "events": [*(list(span) for span in spans), *operations],
    }
    every = gather_objects(mine, mesh.world)
    if mesh.world.rank == 0:
        _write(chrome_trace(every), Path(path))
    mesh.world.barrier()


def _write(trace: dict[str, Any], path: Path) -> None:
    if path.suffix in (".svg", ".png"):
        from pycoll.parallel.tools.draw_layout import draw

        draw(trace["traceEvents"], path)
    else:
        path.write_text(json.dumps(trace) + "\n")


def chrome_trace(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Converts the ranks' records (names, tracks, starts and ends in ns) to Trace Event JSON."""
    start_ns = min((event[2] for rank in ranks for event in rank["events"]), default=0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        pid = rank["rank"]
        events.append(_named("process_name", pid, 0, f"rank {pid}: {rank['place']}"))
        used = {event[1] for event in rank["events"]}
        tracks = [t for t in _TRACKS if t in used] + sorted(used.difference(_TRACKS))
        for tid, track in enumerate(tracks):
            events.append(_named("thread_name", pid, tid, track))
        for name, track, from_ns, to_ns in rank["events"]:
            events.append(
                {
                    "name": name,
                    "cat": track,
                    "ph": "X",
                    "pid": pid,
                    "tid": tracks.index(track),
                    "ts": (from_ns - start_ns) / 1e3,
                    "dur": (to_ns - from_ns) / 1e3,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _operations(mesh: Mesh, axes: tuple[str, ...], first_ns: int) -> list[list[Any]]:
    """The collectives along axes since `first_ns`, from the core's flight record."""
    return [
        [
            f"{record['collective']} {record['nbytes']} B",
            f"axis {'+'.join(axes)}",
            record["entered_ns"],
            record["finished_ns"],
        ]
        for record in mesh.comm(*axes).flight_record()
        if record["entered_ns"] >= first_ns and record["finished_ns"]
    ]


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


__all__ = ["chrome_trace", "trace"]
