"""pycoll beside Gloo between hosts, which are network namespaces of this machine.

    python benchmarks/hosts.py --hosts 2 --per-host 2 --rate 1gbit --json out.json

Needs root, iproute2 and torch. Both run on the same ranks in turn, sample after sample; the time of
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hosts")]

from namespaces import Network  # noqa: E402

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter")


def calls(
    name: str, nbytes: int, comm: Any, dist: Any
) -> tuple[Any, dict[str, Callable[[], object]]] | None:
    """The input, and how each library runs the collective on it; None: too few elements."""
    import torch

    n, count = comm.size, nbytes // 4
    if count < n and name in ("all_to_all", "reduce_scatter"):
        return None
    x = torch.ones(count)
    length = {"all_gather": count * n, "reduce_scatter": count // n}.get(name, count)
    out = torch.empty(length)
    a, b = x.numpy(), out.numpy()
    return a, {
        "all_reduce": {
            "pycoll": lambda: comm.all_reduce(a),
            "gloo": lambda: dist.all_reduce(x),
        },
        "broadcast": {
            "pycoll": lambda: comm.broadcast(a),
            "gloo": lambda: dist.broadcast(x, 0),
        },
        "all_gather": {
            "pycoll": lambda: comm.all_gather(a, b),
            "gloo": lambda: dist.all_gather_into_tensor(out, x),
        },
        "all_to_all": {
            "pycoll": lambda: comm.all_to_all(a, b),
            "gloo": lambda: dist.all_to_all_single(out, x),
        },
        "reduce_scatter": {
            "pycoll": lambda: comm.reduce_scatter(a, out=b),
            "gloo": lambda: dist.reduce_scatter_tensor(out, x),
        },
    }[name]


def rank_main(names: list[str], max_bytes: int, pause_s: float) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    import pycoll

    torch.set_num_threads(1)
    comm = pycoll.init(timeout_s=120)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 100)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rows = []
    nbytes = 4
    while nbytes <= max_bytes:
        for name in names:
            found = calls(name, nbytes, comm, dist)
            if found is None:
                continue
            x, functions = found
            iterations = max(1, min(20, (256 << 10) // nbytes))
            times: dict[str, list[float]] = {library: [] for library in functions}
            for _ in range(16 if nbytes <= 1 << 20 else 6):
                for library, run in functions.items():
                    x[:] = 1
                    comm.barrier()
                    time.sleep(pause_s)
                    comm.barrier()
                    start = time.perf_counter()
                    for _ in range(iterations):
                        run()
                    times[library].append((time.perf_counter() - start) / iterations)
            row: dict[str, Any] = {"collective": name, "nbytes": nbytes}
            for library, samples in times.items():
                row[f"{library}_us"] = sorted(samples[1:])[len(samples) // 2 - 1] * 1e6
            rows.append(row)
        nbytes *= 4
    dist.destroy_process_group()
    comm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--rate", help="of each host's link, as tc has it: 1gbit")
    parser.add_argument("--collectives", default="all_reduce", help=",".join(COLLECTIVES))
    parser.add_argument("--max-bytes", type=int, default=16 << 20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    network = Network(given.hosts)
    try:
        network.set_rate(given.rate)
        pause_s = 0.004 if given.rate else 0
        names = given.collectives.split(",")
        pids = [
            network.start(
                rank // given.per_host,
                lambda: rank_main(names, given.max_bytes, pause_s),
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
    for row in rows:
        ratio = row["gloo_us"] / row["pycoll_us"]
        print(
            f"{row['collective']:<15} {row['nbytes']:>10}  pycoll {row['pycoll_us']:>10.1f} us"
            f"  gloo {row['gloo_us']:>10.1f} us  x{ratio:.2f}"
        )
    logs = [math.log(row["gloo_us"] / row["pycoll_us"]) for row in rows]
    print(f"geometric mean of the ratios: {math.exp(sum(logs) / len(logs)):.2f}")
    if given.json:
        facts = {"hosts": given.hosts, "per_host": given.per_host, "rate": given.rate, "rows": rows}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
