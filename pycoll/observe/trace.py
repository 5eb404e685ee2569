"""Merges flight records of several ranks: a trace over time, the skew of arrivals, pickles."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycoll.errors import UsageError
from pycoll.observe import flight

if TYPE_CHECKING:
    from pycoll.parallel.pipeline.trace_events import Timeline

Entry = dict[str, Any]
Flights = dict[str, dict[int, list[Entry]]]  # by group, then rank: entries, the oldest first

# The names that torch's analysis supports; it stops at any other name.
_FR_TRACE = {
    *("broadcast", "reduce", "all_gather", "all_reduce", "reduce_scatter", "gather"),
    *("scatter", "all_to_all", "barrier", "send", "recv"),
}


def read(paths: Iterable[Path]) -> Flights:
    """Reads files that were written by ranks or by `pycoll doctor --dump`.

    Args:
        paths: Files, or folders of them.

    Returns:
        The entries of each group's ranks. A rank without a file has the entries from the files of
        other ranks.

    Raises:
        UsageError: there are no files, or a file is not a flight record.
    """
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("pycoll-*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError("there are no flight records: expected files named pycoll-*.json")
    flights: Flights = {}
    of_peers: Flights = {}
    for path in files:
        try:
            found = json.loads(path.read_text())
            more = found["pycoll"]
            flights.setdefault(more["group"], {})[found["rank"]] = found["entries"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a flight record of pycoll: {error!r}") from error
        for rank, entries in more["peers"].items():
            ranks = of_peers.setdefault(more["group"], {})
            ranks[int(rank)] = max(ranks.get(int(rank), []), entries, key=_newest)
    for group, ranks in of_peers.items():
        for rank, entries in ranks.items():
            flights[group].setdefault(rank, entries)
    return {group: dict(sorted(ranks.items())) for group, ranks in sorted(flights.items())}


def summary(ranks: dict[int, list[Entry]]) -> list[dict[str, Any]]:
    """Skew of each collective of a group, as in `Communicator.stragglers`."""
    operations: dict[int, dict[int, tuple[str, int]]] = {}
    for rank, entries in ranks.items():
        for entry in entries:
            if entry["is_p2p"]:
                continue
            operation = operations.setdefault(entry["collective_seq_id"], {})
            operation[rank] = (_name(entry), entry["time_created_ns"])
    return flight.skew_table([o for o in operations.values() if len(o) == len(ranks)])


def chrome_trace(flights: Flights, pipelines: Sequence[Timeline] = ()) -> dict[str, Any]:
    """All operations as Trace Event JSON: a process for each group, tracks for each rank.

    Collectives are on a rank's first track, blocking messages on its second one, and asynchronous
    messages on temporary tracks.

    An arrow leads from the last rank to each rank that waited for it, and a counter shows the skew.
    Each pipeline is a process, too, on the same time axis.

    Args:
        flights: Result of `read`.
        pipelines: Result of `pycoll.parallel.pipeline.trace_events.read`.
    """
    from pycoll.parallel.pipeline import trace_events

    events: list[dict[str, Any]] = []
    every = [e for ranks in flights.values() for entries in ranks.values() for e in entries]
    begins = [entry["time_created_ns"] for entry in every] + trace_events.bounds(pipelines)
    start = min(begins, default=0)
    end = max((max(entry["time_created_ns"], _end(entry) or 0) for entry in every), default=0)

    def at_us(ns: int) -> float:
        return (ns - start) / 1e3

    for pid, (group, ranks) in enumerate(flights.items()):
        events.append(_named("process_name", pid, 0, f"communicator {group}"))
        operations: dict[int, list[tuple[int, Entry]]] = {}
        for rank, entries in ranks.items():
            events.append(_named("thread_name", pid, rank, f"rank {rank}"))
            if any(entry["is_p2p"] for entry in entries):
                track = _message_track(rank)
                events.append(_named("thread_name", pid, track, f"rank {rank}, messages"))
            for entry in entries:
                if not entry["is_p2p"]:
                    operations.setdefault(entry["collective_seq_id"], []).append((rank, entry))
                entered = entry["time_created_ns"]
                ended = max(entered, _end(entry) or end)
                events += _slice(pid, rank, entry, at_us(entered), at_us(ended))
        for sequence, taken in sorted(operations.items()):
            if len(taken) < 2 or len({_name(entry) for _, entry in taken}) > 1:
                continue
            events += _arrival(pid, sequence, taken, at_us)
    events += trace_events.events(pipelines, len(flights), at_us)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_pickles(flights: Flights, folder: Path) -> Counter[str]:
    """Writes `rank_N` for torch's fr_trace, which reads pickles only.

    fr_trace accepts only names of torch's own backends: `gloo:` stands for pycoll.

    Returns:
        Number of omitted entries, by collective: fr_trace cannot read these collectives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left_out: Counter[str] = Counter()
    dumps: dict[int, dict[str, Any]] = {}
    for group, ranks in flights.items():
        if "." in group:
            continue  # a part has its own rank numbers, and fr_trace expects those of the world
        for rank, entries in ranks.items():
            kept = [copy.deepcopy(entry) for entry in entries if _fr_trace_knows(entry)]
            left_out.update(_kind(entry) for entry in entries if not _fr_trace_knows(entry))
            for i, entry in enumerate(kept):
                entry["profiling_name"] = f"gloo:{_name(entry)}"
                entry["process_group"] = (group, "pycoll")
                entry["record_id"] = i
                del entry["pycoll"]
            config = {"name": group, "desc": "pycoll", "ranks": str(list(range(len(ranks))))}
            if rank in dumps:
                raise UsageError("fr_trace reads one job at a time: pass the files of one job")
            dumps[rank] = {
                "version": flight.VERSION,
                "pg_config": {group: config},
                "pg_status": {},
                "entries": kept,
            }
    for rank, dump in dumps.items():
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    return left_out


def _slice(pid: int, rank: int, entry: Entry, start: float, end: float) -> list[dict[str, Any]]:
    """The events of one operation."""
    event: dict[str, Any] = {
        "name": _name(entry),
        "cat": "message" if entry["is_p2p"] else "collective",
        "pid": pid,
        "tid": _message_track(rank) if entry["is_p2p"] else rank,
        "ts": start,
        "args": _arguments(entry),
    }
    if not entry["is_p2p"] or entry["pycoll"]["blocking"]:
        return [event | {"ph": "X", "dur": end - start}]
    event["id"] = f"{pid}.{rank}.{entry['p2p_seq_id']}"  # async: these events may overlap
    return [event | {"ph": "b"}, event | {"ph": "e", "ts": end}]


def _message_track(rank: int) -> int:
    return 1000 + rank


def _arrival(
    pid: int, sequence: int, taken: list[tuple[int, Entry]], at_us: Any
) -> list[dict[str, Any]]:
    last_rank, last = max(taken, key=lambda item: item[1]["time_created_ns"])
    first_ns = min(entry["time_created_ns"] for _, entry in taken)
    ts = at_us(last["time_created_ns"])
    skew_us = (last["time_created_ns"] - first_ns) / 1e3
    common = {"name": "arrival", "cat": "arrival", "pid": pid}
    events: list[dict[str, Any]] = [
        {"ph": "C", "name": "arrival skew", "pid": pid, "ts": ts, "args": {"us": skew_us}}
    ]
    for rank, entry in taken:
        if rank == last_rank or (_end(entry) or last["time_created_ns"]) < last["time_created_ns"]:
            continue  # this rank did not wait
        arrow = {**common, "id": f"{pid}.{sequence}.{rank}", "ts": ts}
        events.append({**arrow, "ph": "s", "tid": last_rank})
        events.append({**arrow, "ph": "f", "bp": "e", "tid": rank})
    return events


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _arguments(entry: Entry) -> dict[str, Any]:
    more = entry["pycoll"]
    if entry["is_p2p"]:
        return {
            "number": entry["p2p_seq_id"],
            "peer": more["peer"] if more["source"] is None else more["source"],
            "tag": more["tag"],
            "bytes": more["nbytes"],
            "dtype": entry["input_dtypes"][0],
            "site": more["site"],
            "state": "failed" if more["failed"] else entry["state"],
        }
    return {
        "seq": entry["collective_seq_id"],
        "bytes": more["nbytes"],
        "shape": entry["input_sizes"][0],
        "dtype": entry["input_dtypes"][0],
        "algorithm": more["algorithm"],
        "site": more["site"],
        "state": "failed" if more["failed"] else entry["state"],
    }


def _name(entry: Entry) -> str:
    return str(entry["profiling_name"]).partition(":")[2]


def _kind(entry: Entry) -> str:
    """The name of a collective, or `send` or `recv`."""
    return _name(entry).partition(" ")[0]


def _fr_trace_knows(entry: Entry) -> bool:
    return _kind(entry) in _FR_TRACE and not _name(entry).endswith("<-any")


def _end(entry: Entry) -> int | None:
    return entry["pycoll"]["ended_ns"]  # type: ignore[no-any-return]


def _newest(entries: list[Entry]) -> int:
    return max((entry["time_created_ns"] for entry in entries), default=0)
