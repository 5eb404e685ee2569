"""pycoll beside Gloo and MPI between hosts, which are network namespaces of this machine.

    python benchmarks/hosts.py --hosts 2 --per-host 2 --rate 1gbit --json out.json
    python benchmarks/hosts.py --hosts 2 --per-host 2 --rate 1gbit --mpi mpich --json out.json
    python benchmarks/hosts.py --table out.json

Needs root, iproute2 and torch. All run on the same ranks in turn, sample after sample; the time of
a sample is rank 0's, after a barrier and a pause in which a throttled link regains its burst. A
file keeps many runs; sizes that it has are not measured again, and after `--seconds` no size is
begun: start it again until it says that nothing is missing.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hosts"), str(ROOT / "tests" / "comm")]

from namespaces import Network  # noqa: E402
from record import machine  # noqa: E402
from report import size_name  # noqa: E402

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter")
SAMPLES, SAMPLES_OF_LARGE = 16, 6
SAMPLE_S = 0.05  # at most, as far as one iteration allows it
GLOO_PORTS = 100  # apart from those of pycoll

Run = Callable[[], object]


class Arrays:
    """Input and output of one collective on this rank, as NumPy arrays and as torch tensors."""

    def __init__(self, name: str, nbytes: int, n: int) -> None:
        import torch

        count = nbytes // 4
        length = {"all_gather": count * n, "reduce_scatter": count // n}.get(name, count)
        self.x, self.out = torch.ones(count), torch.empty(length)
        self.a, self.b = self.x.numpy(), self.out.numpy()


def of_pycoll(comm: Any, arrays: Arrays) -> dict[str, Run]:
    a, b = arrays.a, arrays.b
    return {
        "all_reduce": lambda: comm.all_reduce(a),
        "broadcast": lambda: comm.broadcast(a),
        "all_gather": lambda: comm.all_gather(a, b),
        "all_to_all": lambda: comm.all_to_all(a, b),
        "reduce_scatter": lambda: comm.reduce_scatter(a, out=b),
    }


def of_gloo(dist: Any, arrays: Arrays) -> dict[str, Run]:
    x, out = arrays.x, arrays.out
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(out, x),
        "all_to_all": lambda: dist.all_to_all_single(out, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x),
    }


def of_mpi(world: Any, arrays: Arrays) -> dict[str, Run]:
    from mpi4py import MPI

    a, b = arrays.a, arrays.b
    return {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, a),
        "broadcast": lambda: world.Bcast(a, 0),
        "all_gather": lambda: world.Allgather(a, b),
        "all_to_all": lambda: world.Alltoall(a, b),
        "reduce_scatter": lambda: world.Reduce_scatter_block(a, b),
    }


Library = Callable[[Arrays], dict[str, Run]]


def seconds_of(run: Run, iterations: int) -> float:
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    return (time.perf_counter() - start) / iterations


def measure_row(
    comm: Any, name: str, libraries: dict[str, Library], nbytes: int, pause_s: float
) -> dict[str, Any]:
    """Median microseconds of every library, sample after sample in turn."""
    arrays = Arrays(name, nbytes, comm.size)
    functions = {library: of(arrays)[name] for library, of in libraries.items()}
    times: dict[str, list[float]] = {library: [] for library in functions}
    # So few that a throttled link's burst takes them, and that a slow library ends.
    most = max(1, min(20, (256 << 10) // nbytes))
    first_s = np.array([seconds_of(run, 2) for run in functions.values()])
    comm.broadcast(first_s)
    iterations = [max(1, min(most, int(SAMPLE_S / s))) for s in first_s]
    for _ in range(SAMPLES if first_s.max() < SAMPLE_S else SAMPLES_OF_LARGE):
        for (library, run), number in zip(functions.items(), iterations, strict=True):
            arrays.a[:] = 1
            comm.barrier()
            time.sleep(pause_s)
            comm.barrier()
            times[library].append(seconds_of(run, number))
            if name == "all_reduce" and not (arrays.a == comm.size**number).all():
                raise AssertionError(f"{library}: {name} of {nbytes} bytes is wrong")
    row: dict[str, Any] = {"collective": name, "nbytes": nbytes}
    for library, samples in times.items():
        row[f"{library}_us"] = round(sorted(samples)[len(samples) // 2] * 1e6, 1)
    return row


@dataclass(frozen=True)
class Work:
    """What a run has to measure."""

    cases: list[tuple[str, int]]  # collective, bytes
    pause_s: float
    seconds: float

    def rows(self, comm: Any, libraries: dict[str, Library]) -> list[dict[str, Any]]:
        end = time.monotonic() + self.seconds
        rows = []
        for name, nbytes in self.cases:
            if nbytes // 4 < comm.size and name in ("all_to_all", "reduce_scatter"):
                continue
            more = np.array([time.monotonic() < end])
            comm.broadcast(more)
            if not more[0]:
                break
            rows.append(measure_row(comm, name, libraries, nbytes, self.pause_s))
        return rows


def rank_main(work: Work) -> list[dict[str, Any]]:
    """A rank that torchrun's variables name: pycoll over TCP, and Gloo."""
    import torch
    import torch.distributed as dist

    import pycoll

    torch.set_num_threads(1)
    comm = pycoll.init(timeout_s=120)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + GLOO_PORTS)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    libraries: dict[str, Library] = {
        "pycoll": lambda arrays: of_pycoll(comm, arrays),
        "gloo": lambda arrays: of_gloo(dist, arrays),
    }
    rows = work.rows(comm, libraries)
    dist.destroy_process_group()
    comm.close()
    return rows


def mpi_rank_main(work: Work) -> list[dict[str, Any]]:
    """A rank of mpiexec: pycoll over TCP and over MPI, MPI itself, and Gloo."""
    import torch
    import torch.distributed as dist
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
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    libraries: dict[str, Library] = {
        "pycoll": lambda arrays: of_pycoll(comms["tcp"], arrays),
        "gloo": lambda arrays: of_gloo(dist, arrays),
        "pycoll_mpi": lambda arrays: of_pycoll(comms["mpi"], arrays),
        "mpi": lambda arrays: of_mpi(world, arrays),
    }
    rows = work.rows(comms["tcp"], libraries)
    dist.destroy_process_group()
    for comm in comms.values():
        comm.close()
    return rows


def run_under_mpi(given: argparse.Namespace, network: Network, work: Work) -> list[dict[str, Any]]:
    import mpi_kit

    mpi = mpi_kit.need(given.mpi)
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

PAIRS = (("pycoll", "gloo"), ("pycoll_mpi", "mpi"))
NAMES = {"pycoll": "TCP us", "gloo": "Gloo us", "pycoll_mpi": "over MPI us", "mpi": "MPI us"}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown of one run's all_reduce: a ratio above 1 is in pycoll's favour."""
    rows = sorted((row for row in rows if row["collective"] == "all_reduce"),
                  key=lambda row: int(row["nbytes"]))  # fmt: skip
    pairs = [pair for pair in PAIRS if f"{pair[1]}_us" in rows[0]]
    heads = ["Bytes"] + [word for a, b in pairs for word in (NAMES[a], NAMES[b], "ratio")]
    lines = [heads, ["---"] * len(heads)]
    ratios: list[list[float]] = [[] for _ in pairs]
    for row in rows:
        cells = [size_name(row["nbytes"])]
        for (a, b), so_far in zip(pairs, ratios, strict=True):
            one, other = row[f"{a}_us"], row[f"{b}_us"]
            so_far.append(other / one)
            cells += [f"{one:.0f}", f"{other:.0f}", f"{other / one:.2f}"]
        lines.append(cells)
    means = [f"{statistics.geometric_mean(so_far):.2f}" for so_far in ratios]
    lines.append(["geometric mean"] + [word for mean in means for word in ("", "", mean)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def title_of(run: dict[str, Any]) -> str:
    beside = f", started by {run['mpi']}" if run["mpi"] else ""
    return f"{run['hosts']} hosts x {run['per_host']} ranks, {run['rate']}{beside}"


def tables(runs: dict[str, Any]) -> str:
    return "\n\n".join(f"**{title_of(run)}**\n\n{table(run['rows'])}" for run in runs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--rate", help="of each host's link, as tc has it: 1gbit")
    parser.add_argument("--collectives", default="all_reduce", help=",".join(COLLECTIVES))
    parser.add_argument("--min-bytes", type=int, default=4)
    parser.add_argument("--max-bytes", type=int, default=64 << 20)
    parser.add_argument("--mpi", help="started by the mpiexec of mpich or impi, and beside it")
    parser.add_argument("--seconds", type=float, default=600, help="begin no size after so long")
    parser.add_argument("--json", type=Path, help="what was measured, here and before")
    parser.add_argument("--table", type=Path, help="prints the tables of such a file")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        rows = mpi_rank_main(Work(**json.loads(given.as_rank)))
        if os.environ["PMI_RANK"] == "0":
            print("\nROWS " + json.dumps(rows), flush=True)
        return
    if given.table:
        print(tables(json.loads(given.table.read_text())["runs"]))
        return
    kept = given.json is not None and given.json.exists()
    report = json.loads(given.json.read_text()) if kept else {"runs": {}}
    facts = {name: getattr(given, name) for name in ("hosts", "per_host", "rate", "mpi")}
    key = " ".join(str(value) for value in facts.values())
    run = report["runs"].setdefault(key, {**facts, "rows": []})
    has = {(row["collective"], row["nbytes"]) for row in run["rows"]}
    sizes = [4**i for i in range(1, 20) if given.min_bytes <= 4**i <= given.max_bytes]
    cases = [(name, nbytes) for nbytes in sizes for name in given.collectives.split(",")]
    missing = [case for case in cases if case not in has]
    if missing:
        work = Work(missing, 0.004 if given.rate else 0, given.seconds)
        # So that `timeout` leaves no namespaces and no ranks behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
        network = Network(given.hosts)
        try:
            network.set_rate(given.rate)
            measured = (run_under_mpi if given.mpi else run_under_torchrun)(given, network, work)
        finally:
            network.close()
        run["rows"] += measured
        print(table(run["rows"]))
        print(f"missing: {len(missing) - len(measured)} of {len(cases)}")
    if given.json:
        report |= {"date": str(datetime.date.today()), "machine": machine()}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
