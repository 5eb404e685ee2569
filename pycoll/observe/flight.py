"""The flight recorder: each rank's last operations, as JSON in the layout of torch's recorder.

The records are in the memory that the ranks share (csrc/transport/ring/records.h). They are always
on, and readable by every rank and, through `pycoll doctor`, from outside.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pycoll import environment
from pycoll.observe.stacks import is_handled, signal_from_text

if TYPE_CHECKING:
    from pycoll._core import GroupRecords
    from pycoll.communicator import Communicator

FOLDER_VARIABLE = "PYCOLL_FLIGHT_DIR"
SIGNAL_VARIABLE = "PYCOLL_DUMP_SIGNAL"
VERSION = "2.10"  # of torch's layout
_NUM_OF_PEERS = 64  # records of each other rank in a rank's file

# torch's names of dtypes; torch's analysis compares them as text.
_TORCH_DTYPES = {
    **{"f16": "Half", "bf16": "BFloat16", "f32": "Float", "f64": "Double", "bool": "Bool"},
    **{"u8": "Byte", "i8": "Char", "i16": "Short", "i32": "Int", "i64": "Long"},
    **{"c64": "ComplexFloat", "c128": "ComplexDouble"},
}


class Source(Protocol):
    """A source of a group's records: a communicator or `_core.SegmentView`."""

    def group(self) -> dict[str, Any]: ...
    def ranks(self) -> list[dict[str, Any]]: ...
    def records(self, rank: int, at_most: int = ...) -> list[dict[str, Any]]: ...
    def messages(self, rank: int, at_most: int = ...) -> list[dict[str, Any]]: ...


class CommunicatorSource:
    """The records of all ranks of a communicator."""

    def __init__(self, comm: Communicator | GroupRecords) -> None:
        self.group = comm._group
        self.ranks = comm._ranks
        self.records = comm._records
        self.messages = comm._messages


def flight_of(
    source: Source, rank: int, timeout_s: float | None = None, description: str = "pycoll"
) -> dict[str, Any]:
    """One rank's file, as a dict.

    Args:
        source: Source of the records.
        rank: Rank of the file.
        timeout_s: The communicator's timeout in seconds, if known.
        description: Purpose of the group.

    Returns:
        torch's keys `version`, `pg_config`, `pg_status` and `entries`, and `pycoll`: the group, and
        the last records of the other ranks, which may end before they write their own file.
    """
    group = source.group()
    name, size = group["name"], group["size"]
    to_unix_ns = time.time_ns() - group["now_ns"]

    def entries(of: int, at_most: int) -> list[dict[str, Any]]:
        found = [*source.records(of, at_most), *source.messages(of, at_most)]
        found.sort(key=lambda record: record["entered_ns"])
        made: list[dict[str, Any]] = []
        sequence = 0
        for record in found:
            sequence = record.get("sequence", sequence)
            made.append(_entry(record, len(made), sequence, group, to_unix_ns, timeout_s))
        return made

    config = {"name": name, "desc": description, "ranks": str(list(range(size)))}
    own = entries(rank, 1024)
    collectives = [entry for entry in own if not entry["is_p2p"]]
    done = [entry["collective_seq_id"] for entry in collectives if entry["state"] == "completed"]
    newest = collectives[-1]["collective_seq_id"] if collectives else 0
    status = {
        "last_enqueued_collective": newest,
        "last_started_collective": newest,
        "last_completed_collective": done[-1] if done else 0,
    }
    peers = {str(of): entries(of, _NUM_OF_PEERS) for of in range(size) if of != rank}
    return {
        "version": VERSION,
        "rank": rank,
        "pg_config": {name: config},
        "pg_status": {name: status},
        "entries": own,
        "pycoll": {
            "group": name,
            "size": size,
            "failure": group["failure"],
            "time_ns": group["now_ns"] + to_unix_ns,
            "peers": peers,
        },
    }


def file_name(group: str, rank: int) -> str:
    """Name of a rank's file. Names of one job's groups have the same prefix."""
    return f"pycoll-{group}-rank_{rank}.json"


def write(source: Source, ranks: Sequence[int], folder: str | Path, **more: Any) -> list[Path]:
    """Writes the files of some ranks; an existing file is replaced atomically.

    Returns:
        The files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    group = source.group()["name"]
    paths = []
    for rank in ranks:
        path = folder / file_name(group, rank)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(flight_of(source, rank, **more)) + "\n")
        part.replace(path)
        paths.append(path)
    return paths


def frame_of(site: str | None) -> list[dict[str, Any]]:
    """`train.py:12 in step` as torch's list of frames."""
    place, _, function = (site or "").rpartition(" in ")
    file, _, line = place.rpartition(":")
    if not line.isdecimal():
        return []
    return [{"name": function, "filename": file, "line": int(line)}]


def _entry(
    record: dict[str, Any],
    record_id: int,
    sequence: int,
    group: dict[str, Any],
    to_unix_ns: int,
    timeout_s: float | None,
) -> dict[str, Any]:
    """Entry of a collective, or of a message that follows the collective `sequence`."""
    finished_ns = record["finished_ns"]
    is_done = finished_ns is not None and not record["failed"]
    is_message = "tag" in record
    if is_message:
        name = message_name(record)
        inputs = outputs = [record["count"]]
        keys = ["kind", "peer", "source", "tag", "nbytes", "blocking", "site", "failed"]
    else:
        name = record["collective"]
        inputs, outputs = _sizes(record, group["size"])
        keys = ["op", "root", "nbytes", "asked", "algorithm", "site", "failed", "digest"]
    dtype = _TORCH_DTYPES.get(record["dtype"], record["dtype"])
    entered = record["entered_ns"] + to_unix_ns
    return {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": [group["name"], "pycoll"],
        "collective_seq_id": sequence,
        "p2p_seq_id": record.get("number", 0),
        "op_id": record.get("number", sequence),
        "profiling_name": f"pycoll:{name}",
        "time_created_ns": entered,
        "duration_ms": (finished_ns - record["entered_ns"]) / 1e6 if is_done else None,
        "input_sizes": [inputs],
        "input_dtypes": [dtype],
        "output_sizes": [outputs],
        "output_dtypes": [dtype],
        "state": "completed" if is_done else "started",
        "time_discovered_started_ns": entered,
        "time_discovered_completed_ns": finished_ns + to_unix_ns if is_done else None,
        "retired": is_done,
        "timeout_ms": None if timeout_s is None else round(timeout_s * 1e3),
        "is_p2p": is_message,
        "frames": frame_of(record["site"]),
        "pycoll": {key: record[key] for key in keys}
        | {"ended_ns": None if finished_ns is None else finished_ns + to_unix_ns},
    }


def message_name(record: dict[str, Any]) -> str:
    """Name as in torch, `send 0->1` or `recv 1<-0`; `recv 1<-any` until the sender is known."""
    if record["kind"] == "send":
        return f"send {record['rank']}->{record['peer']}"
    source = record["peer"] if record["source"] is None else record["source"]
    return f"recv {record['rank']}<-{'any' if source is None else source}"


def _sizes(record: dict[str, Any], size: int) -> tuple[list[int], list[int]]:
    """Sizes of input and output as in torch; empty where the rank has no input or output."""
    shape, count = list(record["shape"]), record["count"]
    is_root = record["root"] == record["rank"]
    if count is None:
        return shape, shape
    match record["collective"]:
        case "all_gather":
            return shape, [size * math.prod(shape)]
        case "reduce_scatter":
            return shape, [count]
        case "gather":
            return shape, [size * math.prod(shape)] if is_root else []
        case "scatter":
            return [size * count] if is_root else [], [count]
    return shape, shape


def stragglers(source: Source) -> list[dict[str, Any]]:
    """Computes the skew of arrivals for the operations that all records still contain.

    Returns:
        As `skew_table`.
    """
    size = source.group()["size"]
    arrivals: dict[int, dict[int, tuple[str, int]]] = {}
    for rank in range(size):
        for record in source.records(rank):
            operation = arrivals.setdefault(record["sequence"], {})
            operation[rank] = (record["collective"], record["entered_ns"])
    return skew_table([operation for operation in arrivals.values() if len(operation) == size])


def skew_table(operations: Sequence[dict[int, tuple[str, int]]]) -> list[dict[str, Any]]:
    """Summarises operations, each with every rank's collective and entry time in nanoseconds.

    Returns:
        For each collective: `collective`, `operations`, `median_skew_us` and `max_skew_us` (last
        entry minus first), and `last`: how often each rank was last, the most often first.
    """
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for operation in operations:
        kinds = {kind for kind, _ in operation.values()}
        if len(kinds) != 1 or len(operation) < 2:
            continue  # a mismatch has no skew
        last = max(operation, key=lambda rank: operation[rank][1])
        first_ns = min(entered for _, entered in operation.values())
        by_kind.setdefault(kinds.pop(), []).append((operation[last][1] - first_ns, last))
    table = []
    for kind, skews in sorted(by_kind.items()):
        ordered = sorted(skew for skew, _ in skews)
        ranks = [last for _, last in skews]
        counts = {rank: ranks.count(rank) for rank in set(ranks)}
        table.append(
            {
                "collective": kind,
                "operations": len(skews),
                "median_skew_us": ordered[len(ordered) // 2] / 1e3,
                "max_skew_us": ordered[-1] / 1e3,
                "last": dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
            }
        )
    return table


# Automatic dumps: on an error, on a signal.

_watched: weakref.WeakSet[Communicator | GroupRecords] = weakref.WeakSet()
_kept: list[GroupRecords] = []  # watched groups without another owner in Python


def watch_group(records: GroupRecords) -> None:
    """Watches a group that another library has opened, until that library closes it."""
    _kept[:] = [other for other in _kept if not other.closed]
    if environment.read(FOLDER_VARIABLE) or environment.read(SIGNAL_VARIABLE):
        _kept.append(records)
        watch(records)


def watch(comm: Communicator | GroupRecords) -> None:
    """Enables dumps at a communicator's first error and on a signal, as configured."""
    if environment.read(FOLDER_VARIABLE):
        comm._set_on_failure(functools.partial(_dump_referenced, weakref.ref(comm)))
    if text := environment.read(SIGNAL_VARIABLE):
        _watched.add(comm)
        signum = signal_from_text(text, SIGNAL_VARIABLE)
        in_main = threading.current_thread() is threading.main_thread()
        if signum is not None and in_main and not is_handled("self", signum):
            signal.signal(signum, lambda *_: dump_all())


def dump_all() -> list[Path]:
    """Writes this rank's file for every watched communicator."""
    return [path for comm in list(_watched) if not comm.closed for path in _dump(comm)]


def _dump_referenced(reference: weakref.ref[Communicator | GroupRecords]) -> None:
    if (comm := reference()) is not None:
        _dump(comm)


def _dump(comm: Communicator | GroupRecords) -> list[Path]:
    with suppress(OSError):  # a full disk must not hide the error that is being raised
        folder = environment.read(FOLDER_VARIABLE) or "."
        return write(
            CommunicatorSource(comm),
            [comm.rank],
            folder,
            timeout_s=comm.timeout_s,
            description=getattr(comm, "description", "pycoll"),
        )
    return []
