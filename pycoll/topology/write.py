"""Writes a topology as the TOML file that load() reads."""

from __future__ import annotations

from pycoll.errors import UsageError
from pycoll.topology.model import Jitter, Topology

__all__ = ["dumps"]


def dumps(topology: Topology) -> str:
    """Formats a topology of levels, costs of ranks and a device; loads() gives one like it.

    Args:
        topology: without stragglers, jitter and pair matrices.

    Returns:
        The text of a TOML file.

    Raises:
        UsageError: the topology has one of these.
    """
    if topology.stragglers or topology.jitter != Jitter():
        raise UsageError("dumps: stragglers and jitter are not written")
    lines = [f"name = {_quoted(topology.name)}", ""]
    lines += ["[ranks]", f"overhead_s = {topology.overhead_s!r}"]
    if topology.gamma_s_per_byte > 0:
        lines.append(f"reduce_gb_per_s = {1e-9 / topology.gamma_s_per_byte!r}")
    if (device := topology.device) is not None:
        lines += [
            "",
            "[device]",
            f"name = {_quoted(device.name)}",
            f"compute_gflop_per_s = {device.flops_per_s / 1e9!r}",
            f"attained = {device.attained!r}",
            f"memory_gb_per_s = {device.memory_bytes_per_s / 1e9!r}",
            f"operator_s = {device.operator_s!r}",
        ]
        if device.capacity_bytes is not None:
            lines.append(f"capacity_gb = {device.capacity_bytes / 1e9!r}")
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


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
