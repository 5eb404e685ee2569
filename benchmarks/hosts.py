"""pycoll beside Gloo and MPI between hosts, which are network namespaces of this machine.

    python benchmarks/hosts.py --hosts 2 --per-host 2 --rate 1gbit --json out.json
    python benchmarks/hosts.py --hosts 2 --per-host 2 --rate 1gbit --mpi mpich --json out.json
    python benchmarks/hosts.py --table out.json

Needs root, iproute2 and torch. All run on the same ranks in turn, block after block of calls;
before a block there is a pause in which a throttled link regains its burst. A file keeps many runs;
sizes that it has are not measured again, and after `--seconds` no size is begun: start it again
until it says that nothing is missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hosts"), str(ROOT / "tests" / "comm")]

from delayed import DelayedNetwork, why_not_delayed  # noqa: E402
from namespaces import Network  # noqa: E402
from report import us  # noqa: E402

from pycoll.bench.adapters import Gloo, Mpi, Pycoll  # noqa: E402
from pycoll.bench.case import Case  # noqa: E402
from pycoll.bench.measure import agree, measure_message  # noqa: E402
from pycoll.bench.record import Record, Row, by_library, machine  # noqa: E402
from pycoll.bench.timing import MOST_CALLS, Effort  # noqa: E402
from pycoll.cli.units import format_nbytes  # noqa: E402

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "reduce",
    "gather",
    "scatter",
)
BLOCKS, LIMIT_S = 20, 4.0
GLOO_PORTS = 100  # apart from those of pycoll


@dataclass(frozen=True)
class Work:
    """The messages that a run measures, where, and for how long at most."""

    messages: list[tuple[str, int]]  # collective, bytes
    where: str
    pause_s: float
    seconds: float

    def rows(self, comm: Any, adapters: dict[str, Any]) -> list[dict[str, Any]]:
        """All libraries on the same ranks in turn. Collective."""

        def barrier() -> None:
            comm.barrier()
            if self.pause_s:
                time.sleep(self.pause_s)
                comm.barrier()

        end = time.monotonic() + self.seconds
        rows: list[Row] = []
        for name, nbytes in self.messages:
            if not agree(comm, time.monotonic() < end, "min"):
                break
            # So few calls that a throttled link's burst takes them.
            most = max(1, min(20, (256 << 10) // nbytes)) if self.pause_s else MOST_CALLS
            effort = Effort(BLOCKS, rounds=BLOCKS, limit_s=LIMIT_S, most_calls=most)
            case = Case.of_size(name, "f32", comm.size, nbytes, where=self.where)
            rows += measure_message(comm, adapters, case, effort, 2, barrier)
        for row in rows:
            if row.num_wrong:
                raise AssertionError(f"{row.num_wrong} wrong elements: {row.case}")
        return [row.as_dict() for row in rows]


def rank_main(work: Work) -> list[dict[str, Any]]:
    """A rank that torchrun's variables name: pycoll over TCP, and Gloo."""
    import torch

    import pycoll

    torch.set_num_threads(1)
    comm = pycoll.init(timeout_s=120)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + GLOO_PORTS)
    gloo = Gloo(timeout=datetime.timedelta(seconds=120))
    rows = work.rows(comm, {"pycoll": Pycoll(comm), "gloo": gloo})
    gloo.dist.destroy_process_group()
    comm.close()
    return rows


def mpi_rank_main(work: Work) -> list[dict[str, Any]]:
    """A rank of mpiexec: pycoll over TCP and over MPI, MPI itself, and Gloo."""
    import torch
    from mpi4py import MPI

    import pycoll

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    comms = {}
    for transport in ("tcp", "mpi"):
        os.environ["PYCOLL_TRANSPORT"] = transport
        comms[transport] = pycoll.init(timeout_s=120, mpi=world)
        assert comms[transport].transport == transport
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.77.0.1"}
    os.environ |= {"MASTER_PORT": "21877", "RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    gloo = Gloo(timeout=datetime.timedelta(seconds=120))
    adapters = {
        "pycoll": Pycoll(comms["tcp"]),
        "gloo": gloo,
        "pycoll_mpi": Pycoll(comms["mpi"]),
        "mpi": Mpi(),
    }
    rows = work.rows(comms["tcp"], adapters)
    gloo.dist.destroy_process_group()
    for comm in comms.values():
        comm.close()
    return rows


def run_under_mpi(given: argparse.Namespace, network: Network, work: Work) -> list[dict[str, Any]]:
    import mpi_kit
    import pytest

    try:
        mpi = mpi_kit.need(given.mpi)
    except pytest.skip.Exception as reason:
        raise SystemExit(f"hosts.py: --mpi: {reason}") from None
    words = [sys.executable, str(Path(__file__).resolve()), "--as-rank", json.dumps(asdict(work))]
    job = mpi_kit.mpiexec(mpi, network, given.per_host, words, 900)
    lines = [line for line in job.text.splitlines() if line.startswith("ROWS ")]
    if job.status != 0 or not lines:
        raise SystemExit(job.text)
    rows: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ROWS "))
    return rows


def run_under_torchrun(
    given: argparse.Namespace, network: Network, work: Work
) -> list[dict[str, Any]]:
    """Ranks that torchrun's variables name."""
    num_ranks = given.hosts * given.per_host
    pids = [
        network.start(
            rank // given.per_host,
            lambda: rank_main(work),
            RANK=str(rank),
            WORLD_SIZE=str(num_ranks),
            MASTER_ADDR=network.address(0),
            MASTER_PORT="21777",
            PYCOLL_TOKEN="benchmark",
        )
        for rank in range(num_ranks)
    ]
    rows: list[dict[str, Any]] = [network.outcome(pid, 600) for pid in pids][0].get()
    return rows


# --- what comes out ------------------------------------------------------------------------------

# A cell has the us of the first pair's first library, then of each pair how many times as long the
# second library takes.
Pairs = tuple[tuple[str, str], ...]
BESIDE_GLOO: Pairs = (("pycoll", "gloo"),)
BESIDE_MPI: Pairs = (("pycoll", "mpi"), ("pycoll_mpi", "mpi"))
STARTED_BY = ", started by "


Messages = list[list[Row]]
Runs = dict[str, Messages]  # by where


def tables(record: Record) -> str:
    """Each size of all_reduce: of ranks without MPI, then of each MPI. A summary of the others."""
    runs: dict[str, dict[str, Runs]] = {}
    for rows in record.messages():
        case = rows[0].case
        where, _, mpi = case.where.partition(STARTED_BY)
        runs.setdefault(case.collective, {}).setdefault(mpi, {}).setdefault(where, []).append(rows)
    made = []
    for mpi, of_mpi in sorted(runs.pop("all_reduce", {}).items()):
        head = f"**Beside {mpi}: over TCP, and links over MPI**\n\n" if mpi else ""
        made.append(head + overview(of_mpi, BESIDE_MPI if mpi else BESIDE_GLOO))
    if runs:
        made.append(summary(runs))
    return "\n\n".join(made)


def summary(runs: dict[str, dict[str, Runs]]) -> str:
    """Markdown, a line for each collective and run: how many times as long others take."""
    columns = {
        "Gloo": ("pycoll", "gloo"),
        "MPI": ("pycoll", "mpi"),
        "MPI, beside links over MPI": ("pycoll_mpi", "mpi"),
    }
    out = [["", "", *columns], ["---"] * (2 + len(columns))]
    for collective, by_mpi in runs.items():
        for of_mpi in by_mpi.values():
            for where, messages in of_mpi.items():
                out.append([collective, where, *(spread(messages, p) for p in columns.values())])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in out)


def spread(messages: Messages, pair: tuple[str, str]) -> str:
    """Geometric mean of a ratio over all sizes, and the lowest."""
    own, other = pair
    ratios = {}
    for rows in messages:
        times = by_library(rows)
        if own in times and other in times:
            ratios[rows[0].case.nbytes] = us(times[other]) / us(times[own])
    if not ratios:
        return ""
    lowest = min(ratios, key=lambda nbytes: ratios[nbytes])
    mean = statistics.geometric_mean(ratios.values())
    return f"{mean:.2f}, lowest {ratios[lowest]:.2f} at {format_nbytes(lowest)}"


def overview(runs: Runs, pairs: Pairs) -> str:
    """Markdown of all runs; a ratio above 1 is in pycoll's favour."""
    sizes = sorted({rows[0].case.nbytes for messages in runs.values() for rows in messages})
    out = [["Bytes", *runs], ["---"] * (1 + len(runs))]
    out += [[format_nbytes(nbytes)] for nbytes in sizes] + [["geometric mean"]]
    for messages in runs.values():
        lines = {rows[0].case.nbytes: by_library(rows) for rows in messages}
        all_ratios: list[list[float]] = []
        for cells, nbytes in zip(out[2:], sizes, strict=False):
            if nbytes not in lines:
                cells.append("")
                continue
            line = lines[nbytes]
            all_ratios.append([us(line[b]) / us(line[a]) for a, b in pairs])
            first = f"{us(line[pairs[0][0]]):.0f}"
            cells.append(", ".join([first, *(f"{ratio:.2f}" for ratio in all_ratios[-1])]))
        means = map(statistics.geometric_mean, zip(*all_ratios, strict=True))
        out[-1].append(", ".join(f"{mean:.2f}" for mean in means))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--rate", help="rate of each host's link, as for tc: 1gbit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each packet, one way")
    parser.add_argument("--congestion", default="cubic", help="control of TCP, as for ip route")
    parser.add_argument("--collectives", default="all_reduce", help=",".join(COLLECTIVES))
    parser.add_argument("--min-bytes", type=int, default=4)
    parser.add_argument("--max-bytes", type=int, default=64 << 20)
    parser.add_argument("--mpi", help="started by the mpiexec of mpich or impi, and beside it")
    parser.add_argument("--seconds", type=float, default=600, help="begin no size after so long")
    parser.add_argument("--json", type=Path, help="the record, which this run adds to")
    parser.add_argument("--table", type=Path, help="prints the tables of such a file")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        rows = mpi_rank_main(Work(**json.loads(given.as_rank)))
        if os.environ["PMI_RANK"] == "0":
            print("\nROWS " + json.dumps(rows), flush=True)
        return
    if given.table:
        print(tables(Record.load(given.table)))
        return
    beside = f"{STARTED_BY}{given.mpi}" if given.mpi else ""
    delay = f", {given.delay_ms:g} ms" if given.delay_ms else ""
    each = f"{given.per_host} rank{'s' * (given.per_host > 1)}"
    where = f"{given.hosts} hosts x {each}, {given.rate}{delay}{beside}"
    facts = {
        "question": "collectives between hosts",
        "machine": machine(),
        "congestion_control": given.congestion,
    }
    record = Record.open(given.json, facts)
    has = {(case.collective, case.nbytes) for case in record.rows if case.where == where}
    n = given.hosts * given.per_host
    sizes = [4**i for i in range(1, 20) if given.min_bytes <= 4**i <= given.max_bytes]
    names = given.collectives.split(",")
    cases = dict.fromkeys(Case.of_size(name, "f32", n, size) for size in sizes for name in names)
    wanted = [(case.collective, case.nbytes) for case in cases]
    missing = [message for message in wanted if message not in has]
    if missing:
        if given.delay_ms and (why := why_not_delayed()):
            raise SystemExit(f"hosts.py: --delay-ms: {why}")
        work = Work(missing, where, 0.004 if given.rate else 0, given.seconds)
        # So that `timeout` leaves no namespaces and no ranks behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
        network = (DelayedNetwork if given.delay_ms else Network)(given.hosts)
        try:
            if isinstance(network, DelayedNetwork):
                network.set_delay(given.delay_ms / 1e3)
            network.set_rate(given.rate)
            network.set_congestion_control(given.congestion)
            measured = (run_under_mpi if given.mpi else run_under_torchrun)(given, network, work)
        finally:
            network.close()
        record.add(*(Row.of_dict(row) for row in measured))
        print(tables(record))
        left = len(missing) - len({(row["collective"], row["nbytes"]) for row in measured})
        print(f"missing: {left} of {len(wanted)}")


if __name__ == "__main__":
    main()
