"""Clusters of many hosts, the domains of one host, and how long collectives take on them.

    >>> from pycoll import topology
    >>> cluster = topology.uniform(16, latency_s=5e-6, link_bytes_per_s=25e9)
    >>> result = cluster.simulate("all_reduce", "ring", 1 << 20)
    >>> f"{result.time_s * 1e6:.0f} us"
    '229 us'

A cluster is described in a TOML file: topology.load("cluster.toml"); the domains of a host, such as
cores that share an L3, are read from sysfs: topology.read_host(). See docs/simulation.md.
"""

from __future__ import annotations

from pycoll.topology.device import Device
from pycoll.topology.file import load, loads
from pycoll.topology.host import DomainLevel, Host
from pycoll.topology.model import Jitter, Level, Straggler, Topology, uniform
from pycoll.topology.result import LevelUse, NetworkSimulation, Timeline
from pycoll.topology.simulated_world import World
from pycoll.topology.sysfs import read_host
from pycoll.topology.write import dumps

__all__ = [
    "Device",
    "DomainLevel",
    "Host",
    "Jitter",
    "Level",
    "LevelUse",
    "NetworkSimulation",
    "Straggler",
    "Timeline",
    "Topology",
    "World",
    "dumps",
    "load",
    "loads",
    "read_host",
    "uniform",
]
