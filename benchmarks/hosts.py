"""pycoll beside Gloo and MPI between hosts, which are network namespaces of this machine.

    python benchmarks/hosts.py --hosts 2 --per-host 2 --rate 1gbit --json out.json
    python benchmarks/hosts.py --hosts 2 --rate 1gbit --mpi mpich

Needs root, iproute2 and torch. All run on the same ranks in turn, sample after sample; the time of
a sample is rank 0's, after a barrier and a pause in which a throttled link regains its burst.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hosts"), str(ROOT / "tests" / "comm")]

from namespaces import Network  # noqa: E402

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter")
SAMPLES, SAMPLES_OF_LARGE = 16, 6
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


def measure(
    names: list[str],
    libraries: dict[str, Library],
    barrier: Run,
    n: int,
    sizes: list[int],
    pause_s: float,
) -> list[dict[str, Any]]:
    """Median microseconds of every library at every size, sample after sample in turn."""
    rows = []
    for nbytes in sizes:
        for name in names:
            if nbytes // 4 < n and name in ("all_to_all", "reduce_scatter"):
                continue
            arrays = Arrays(name, nbytes, n)
            functions = {library: of(arrays)[name] for library, of in libraries.items()}
            iterations = max(1, min(20, (256 << 10) // nbytes))
            times: dict[str, list[float]] = {library: [] for library in functions}
            for _ in range(SAMPLES if nbytes <= 1 << 20 else SAMPLES_OF_LARGE):
                for library, run in functions.items():
                    arrays.a[:] = 1
                    barrier()
                    time.sleep(pause_s)
                    barrier()
                    start = time.perf_counter()
                    for _ in range(iterations):
                        run()
                    times[library].append((time.perf_counter() - start) / iterations)
                    if name == "all_reduce" and not (arrays.a == n**iterations).all():
                        raise AssertionError(f"{library}: {name} of {nbytes} bytes is wrong")
            row: dict[str, Any] = {"collective": name, "nbytes": nbytes}
            for library, samples in times.items():
                row[f"{library}_us"] = sorted(samples[1:])[len(samples) // 2 - 1] * 1e6
            rows.append(row)
    return rows


def rank_main(names: list[str], sizes: list[int], pause_s: float) -> list[dict[str, Any]]:
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
    rows = measure(names, libraries, comm.barrier, comm.size, sizes, pause_s)
    dist.destroy_process_group()
    comm.close()
    return rows


def mpi_rank_main(names: list[str], sizes: list[int], pause_s: float) -> list[dict[str, Any]]:
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
    rows = measure(names, libraries, comms["tcp"].barrier, world.size, sizes, pause_s)
    dist.destroy_process_group()
    for comm in comms.values():
        comm.close()
    return rows


def run_under_mpi(given: argparse.Namespace, network: Network) -> list[dict[str, Any]]:
    import mpi_kit

    mpi = mpi_kit.need(given.mpi)
    words = [sys.executable, *sys.argv, "--as-rank"]
    job = mpi_kit.mpiexec(mpi, network, given.per_host, words, 900)
    lines = [line for line in job.text.splitlines() if line.startswith("ROWS ")]
    if job.status != 0 or not lines:
        raise SystemExit(job.text)
    rows: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ROWS "))
    return rows


def ratios(rows: list[dict[str, Any]], one: str, other: str) -> None:
    """How much faster one library is than the other, row by row."""
    for row in rows:
        ratio = row[f"{other}_us"] / row[f"{one}_us"]
        print(
            f"{row['collective']:<15} {row['nbytes']:>10}  {one} {row[f'{one}_us']:>10.1f} us"
            f"  {other} {row[f'{other}_us']:>10.1f} us  x{ratio:.2f}"
        )
    logs = [math.log(row[f"{other}_us"] / row[f"{one}_us"]) for row in rows]
    print(f"geometric mean of the ratios: {math.exp(sum(logs) / len(logs)):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--rate", help="of each host's link, as tc has it: 1gbit")
    parser.add_argument("--collectives", default="all_reduce", help=",".join(COLLECTIVES))
    parser.add_argument("--min-bytes", type=int, default=4)
    parser.add_argument("--max-bytes", type=int, default=16 << 20)
    parser.add_argument("--mpi", help="started by the mpiexec of mpich or impi, and beside it")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pause_s = 0.004 if given.rate else 0
    names = given.collectives.split(",")
    sizes = [4**i for i in range(1, 20) if given.min_bytes <= 4**i <= given.max_bytes]
    if given.as_rank:
        rows = mpi_rank_main(names, sizes, pause_s)
        if os.environ["PMI_RANK"] == "0":
            print("\nROWS " + json.dumps(rows), flush=True)
        return
    network = Network(given.hosts)
    try:
        network.set_rate(given.rate)
        if given.mpi:
            rows = run_under_mpi(given, network)
        else:
            pids = [
                network.start(
                    rank // given.per_host,
                    lambda: rank_main(names, sizes, pause_s),
                    RANK=str(rank),
                    WORLD_SIZE=str(given.hosts * given.per_host),
                    MASTER_ADDR=network.address(0),
                    MASTER_PORT="21777",
                    PYCOLL_TOKEN="benchmark",
                )
                for rank in range(given.hosts * given.per_host)
            ]
            rows = [network.outcome(pid, 600).get() for pid in pids][0]
    finally:
        network.close()
    ratios(rows, "pycoll", "gloo")
    if given.mpi:
        ratios(rows, "pycoll_mpi", "mpi")
    if given.json:
        facts = {"hosts": given.hosts, "per_host": given.per_host, "rate": given.rate}
        facts |= {"mpi": given.mpi, "rows": rows}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
