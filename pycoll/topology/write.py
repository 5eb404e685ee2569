"""Writes a topology as the TOML file that load() reads."""

from __future__ import annotations

from pycoll.errors import UsageError
from pycoll.topology.model import Jitter, Topology

__all__ = ["dumps"]


def dumps(topology: Topology) -> str:
    """Formats a topology of levels and costs of ranks; loads() gives an equal one.

    Args:
        topology: without stragglers, jitter, device and pair matrices.

    Returns:
        The text of a TOML file.

    Raises:
        UsageError: the topology has one of these.
    """
    if topology.stragglers or topology.jitter != Jitter() or topology.device is not None:
        raise UsageError("dumps: stragglers, jitter and devices are not written")
    quoted = topology.name.replace("\\", "\\\\").replace('"', '\\"')
    lines = [f'name = "{quoted}"', "", "[ranks]", f"overhead_s = {topology.overhead_s!r}"]
    if topology.gamma_s_per_byte > 0:
        lines.append(f"reduce_gb_per_s = {1e-9 / topology.gamma_s_per_byte!r}")
    for level in topology.levels:
        if level.pair_bytes_per_s or level.pair_latency_s:
            raise UsageError(f"dumps: the pair matrices of level {level.name!r} are not written")
        lines += [
            "",
            "[[level]]",
            f'name = "{level.name}"',
            f"size = {level.size}",
            f"num_links = {level.num_links}",
            f"link_gb_per_s = {level.link_bytes_per_s / 1e9!r}",
            f"latency_s = {level.latency_s!r}",
            f"rails = {str(level.rails).lower()}",
            f"carries_outside = {str(level.carries_outside).lower()}",
        ]
    return "\n".join([*lines, ""])
