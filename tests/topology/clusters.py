"""Clusters for tests, with round numbers for calculation by hand."""

from __future__ import annotations

from typing import Any

from pycoll.topology import Level, Topology


def hosts(num_hosts: int, ranks_per_host: int, **options: Any) -> Topology:
    """Ranks with a port of 8 B/s inside hosts with one link of 1 B/s."""
    inner = {"link_bytes_per_s": 8.0} | options.pop("inner", {})
    outer = {"link_bytes_per_s": 1.0} | options.pop("outer", {})
    return Topology(
        levels=(
            Level(name="host", size=ranks_per_host, **inner),
            Level(name="cluster", size=num_hosts, **outer),
        ),
        **options,
    )


def fat_tree(num_racks: int, hosts_per_rack: int, ranks_per_host: int, **options: Any) -> Topology:
    """Three levels, oversubscribed above the racks, with latencies."""
    return Topology(
        levels=(
            Level(
                name="host",
                size=ranks_per_host,
                link_bytes_per_s=400e9,
                latency_s=1e-6,
                carries_outside=False,
            ),
            Level(
                name="rack",
                size=hosts_per_rack,
                num_links=ranks_per_host,
                link_bytes_per_s=50e9,
                latency_s=3e-6,
            ),
            Level(name="spine", size=num_racks, num_links=2, link_bytes_per_s=50e9, latency_s=6e-6),
        ),
        overhead_s=5e-7,
        gamma_s_per_byte=1e-12,
        **options,
    )
