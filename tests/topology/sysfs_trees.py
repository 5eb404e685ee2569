"""Writes sysfs as servers have it, from the facts that their makers and `lscpu` publish."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What decides a server's `cpu/` and `node/`.

    Linux numbers the first thread of every core, socket after socket, then the second threads.

    Args:
        sockets: number of sockets.
        nodes: NUMA nodes of a socket.
        cores: cores of a NUMA node.
        cores_per_l3: cores that share an L3.
        threads: threads of a core.
        distances: row of node 0, as the firmware gives it: by |difference| of the nodes' numbers.
        memory_nodes: nodes without CPUs, such as the memory of a GPU.
    """

    sockets: int
    nodes: int
    cores: int
    cores_per_l3: int
    threads: int
    distances: tuple[int, ...]
    memory_nodes: int = 0

    @property
    def num_cores(self) -> int:
        return self.sockets * self.nodes * self.cores


# AMD EPYC 7763: 64 cores and 8 complexes of 8 cores with 32 MiB of L3 (Zen 3). NPS ("nodes per
# socket", AMD's tuning guide for EPYC 7003) is 1 or 4; distances of the local node, the same socket
# and the other socket are 10, 12 and 32.
EPYC_NPS1 = Server(sockets=2, nodes=1, cores=64, cores_per_l3=8, threads=2, distances=(10, 32))
EPYC_NPS4 = Server(
    sockets=2,
    nodes=4,
    cores=16,
    cores_per_l3=8,
    threads=2,
    distances=(10, 12, 12, 12, 32, 32, 32, 32),
)
# Intel Xeon Platinum 8480+: 56 cores and one L3 of 105 MB. With SNC4 ("sub-NUMA clusters") a socket
# has 4 nodes of 14 cores, and the L3 is still listed as the socket's.
SPR = Server(sockets=2, nodes=1, cores=56, cores_per_l3=56, threads=2, distances=(10, 21))
SPR_SNC4 = Server(
    sockets=2,
    nodes=4,
    cores=14,
    cores_per_l3=56,
    threads=2,
    distances=(10, 12, 12, 12, 21, 21, 21, 21),
)
# NVIDIA GH200: 72 Neoverse V2 cores, one L3 of 114 MB, no SMT. The memory of the GPU is a NUMA node
# without CPUs, and seven more are kept for MIG (NVIDIA's Grace tuning guide).
GRACE = Server(
    sockets=1,
    nodes=1,
    cores=72,
    cores_per_l3=72,
    threads=1,
    distances=(10, *[80] * 8),
    memory_nodes=8,
)
GRACE_CPU = Server(sockets=2, nodes=1, cores=72, cores_per_l3=72, threads=1, distances=(10, 40))


def write(root: Path, server: Server, links: bool = True) -> Path:
    """Writes the tree under `root`, which it returns.

    With `links`, folders with the same content are links to one: files are slow to make.
    """
    n = server.num_cores
    num_nodes = server.sockets * server.nodes

    def cpus(cores: range) -> list[int]:
        return [thread * n + core for thread in range(server.threads) for core in cores]

    def block(core: int, size: int) -> range:
        return range(core // size * size, core // size * size + size)

    _put(root / "cpu/online", listed(range(n * server.threads)))
    for cpu in range(n * server.threads):
        core, folder = cpu % n, root / f"cpu/cpu{cpu}"
        if links and cpu != core:
            os.symlink(f"cpu{core}", folder)
            continue
        _put(folder / "topology/thread_siblings_list", listed(cpus(range(core, core + 1))))
        _put(folder / "topology/physical_package_id", str(core // (server.nodes * server.cores)))
        l3 = block(core, server.cores_per_l3)
        if links and cpu != l3[0]:
            os.symlink(f"../cpu{l3[0]}/cache", folder / "cache")
            continue
        _put(folder / "cache/index2/level", "2")  # no domain
        _put(folder / "cache/index2/shared_cpu_list", listed(cpus(range(core, core + 1))))
        _put(folder / "cache/index3/level", "3")
        _put(folder / "cache/index3/shared_cpu_list", listed(cpus(l3)))
    for node in range(num_nodes + server.memory_nodes):
        mine = cpus(block(node * server.cores, server.cores)) if node < num_nodes else []
        row = [server.distances[abs(node - to)] for to in range(len(server.distances))]
        if num_nodes == 8:  # by socket, and the node itself
            near, far = server.distances[1], server.distances[-1]
            row = [10 if to == node else near if to // 4 == node // 4 else far for to in range(8)]
        _put(root / f"node/node{node}/cpulist", listed(mine))
        _put(root / f"node/node{node}/distance", " ".join(map(str, row)))
    return root


def listed(cpus: range | list[int]) -> str:
    """A list as the kernel writes it, such as `0-7,128-135`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _put(path: Path, text: str) -> None:
    os.makedirs(path.parent, exist_ok=True)
    with open(path, "w") as file:  # thousands of small files: faster than Path.write_text
        file.write(text + "\n")
