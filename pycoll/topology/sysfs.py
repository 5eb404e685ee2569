"""Reads the domains of one host from sysfs: cores that share an L3, NUMA nodes, sockets.

Invariant: the domains of a Host are nested, and each level has more than one core to a unit and
differs from the level below, so a machine whose L3, NUMA node and socket coincide has one level.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from pycoll.arguments import shown
from pycoll.errors import UsageError
from pycoll.topology.host import DomainLevel, Host

__all__ = ["read_host"]

ROOT = "/sys/devices/system"
_MOST_CPUS = 1 << 16  # a list of CPUs is refused beyond that


def read_host(root: str | Path = ROOT, cpus: Collection[int] | None = None) -> Host:
    """Reads the domains of a host.

    Args:
        root: the folder with `cpu/` and `node/`: sysfs of this machine, or a copy.
        cpus: numbers of the CPUs that count, such as os.sched_getaffinity(0). None is all that are
            online. CPUs that are offline do not count.

    Returns:
        The host; SMT siblings are one core.

    Raises:
        UsageError: there is no `cpu/` folder, no CPU is left, a file has no list of CPUs, or two
            levels overlap without one being inside the other.

    Cost: reads five files for each CPU; tens of milliseconds for 256 CPUs.
    """
    base = Path(root)
    online = _online(base / "cpu")
    usable = sorted(online if cpus is None else online & set(cpus))
    if not usable:
        raise UsageError(f"{base}/cpu: none of the {len(online)} CPUs that are online may be used")
    notes: list[str] = []
    first_of = {cpu: _siblings(base, cpu, usable)[0] for cpu in usable}
    cores = tuple(
        tuple(cpu for cpu in usable if first_of[cpu] == first)
        for first in sorted(set(first_of.values()))
    )
    nodes = _nodes(base / "node")
    found = {
        "l3": _partition(cores, lambda cpu: _l3(base, cpu), "L3 cache", notes),
        "numa": _partition(cores, lambda cpu: _node_of(nodes, cpu), "NUMA node", notes),
        "socket": _partition(cores, lambda cpu: _socket(base, cpu), "socket", notes),
    }
    levels = _nested({name: units for name, units in found.items() if units}, cores)
    order = _tree_order(levels, cores)
    return Host(
        cores=tuple(sorted(cores, key=lambda core: order[core[0]])),
        levels=levels,
        distances={node: _distances(base / "node", node) for node in nodes},
        nodes=nodes,
        notes=tuple(notes),
        num_online=len(online),
    )


def parse_cpus(text: str, where: str | Path) -> list[int]:
    """Numbers of a list such as `0-3,8,10-11`, as the kernel writes it."""
    numbers: list[int] = []
    for part in text.strip().split(",") if text.strip() else []:
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or part.endswith("-"):
            raise UsageError(f"{where}: expected a list of CPUs such as 0-3,8, got {shown(text)}")
        end = int(last or first)
        if end < int(first) or end >= _MOST_CPUS:
            raise UsageError(f"{where}: {part} is not a range of CPUs below {_MOST_CPUS}")
        numbers += range(int(first), end + 1)
    return numbers


def _read(path: Path) -> str | None:
    """Content of a file; None if it is missing, or the kernel has no value for it."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _online(folder: Path) -> set[int]:
    if (text := _read(folder / "online")) is not None:
        return set(parse_cpus(text, folder / "online"))
    try:
        names = [name[3:] for name in os.listdir(folder) if name.startswith("cpu")]
    except OSError:
        raise UsageError(f"{folder} is not a folder of sysfs: expected cpu0, cpu1, ...") from None
    numbers = (int(name) for name in names if name.isdecimal())
    return {cpu for cpu in numbers if _read(folder / f"cpu{cpu}" / "online") != "0"}


def _siblings(base: Path, cpu: int, usable: list[int]) -> list[int]:
    path = base / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    text = _read(path)
    of_core = set(parse_cpus(text, path)) & set(usable) if text else set()
    return sorted(of_core | {cpu})


def _l3(base: Path, cpu: int) -> object:
    caches = base / "cpu" / f"cpu{cpu}" / "cache"
    for index in sorted(caches.glob("index[0-9]")):
        text = _read(index / "shared_cpu_list")
        if text and _read(index / "level") == "3":
            return min(parse_cpus(text, index / "shared_cpu_list"), default=None)
    return None


def _socket(base: Path, cpu: int) -> object:
    text = _read(base / "cpu" / f"cpu{cpu}" / "topology" / "physical_package_id")
    return text if text and text.isdecimal() else None  # -1: the firmware does not say


def _nodes(folder: Path) -> dict[int, tuple[int, ...]]:
    """CPUs of each NUMA node, by its number; nodes that have memory alone have none."""
    nodes = {}
    for path in folder.glob("node[0-9]*"):
        text = _read(path / "cpulist")
        if path.name[4:].isdecimal() and text is not None:
            nodes[int(path.name[4:])] = tuple(parse_cpus(text, path / "cpulist"))
    return dict(sorted(nodes.items()))


def _node_of(nodes: dict[int, tuple[int, ...]], cpu: int) -> object:
    return next((node for node, cpus in nodes.items() if cpu in cpus), None)


def _distances(folder: Path, node: int) -> tuple[int, ...]:
    text = _read(folder / f"node{node}" / "distance") or ""
    return tuple(int(part) for part in text.split() if part.isdecimal())


Cores = tuple[tuple[int, ...], ...]
Units = tuple[tuple[int, ...], ...]  # CPUs of each unit


def _partition(
    cores: Cores, unit_of: Callable[[int], object], what: str, notes: list[str]
) -> Units | None:
    """Units of a level; None, and a note, if sysfs does not have it for all cores."""
    units: dict[object, list[int]] = {}
    for core in cores:
        units.setdefault(unit_of(core[0]), []).extend(core)
    if None in units:
        notes.append(f"sysfs has no {what} for {len(units[None])} CPUs: that level is left out")
        return None
    return tuple(sorted(tuple(sorted(unit)) for unit in units.values()))


def _nested(found: dict[str, Units], cores: Cores) -> tuple[DomainLevel, ...]:
    """Levels from the inside out, ending with the host; levels that coincide are one."""
    everything: Units = (tuple(sorted(cpu for core in cores for cpu in core)),)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    levels: list[DomainLevel] = []
    core_of = {cpu: core for core in cores for cpu in core}
    for name, units in [*ordered, ("host", everything)]:
        if len(units) == len(cores) and name != "host":
            continue  # a unit is a core
        if levels and levels[-1].units == units:
            levels[-1] = DomainLevel(name, units, (*levels[-1].also, levels[-1].name))
            continue
        inner = levels[-1].units if levels else tuple(core_of.values())
        if (split := _split_unit(inner, units)) is not None:
            below = levels[-1].name if levels else "core"
            raise UsageError(
                f"sysfs: a unit of level {name} has a part of the {below} of CPUs {split}: "
                "expected levels inside each other"
            )
        levels.append(DomainLevel(name, units))
    return tuple(levels)


def _split_unit(inner: Iterable[tuple[int, ...]], outer: Units) -> str | None:
    unit_of = {cpu: number for number, unit in enumerate(outer) for cpu in unit}
    for unit in inner:
        if len({unit_of[cpu] for cpu in unit}) > 1:
            return f"{unit[0]} to {unit[-1]}"
    return None


def _tree_order(levels: tuple[DomainLevel, ...], cores: Cores) -> dict[int, tuple[int, ...]]:
    """By the first CPU of each core: numbers of its units from the outside in, then the CPU."""
    return {core[0]: (*(lv.unit_of(core[0]) for lv in reversed(levels)), core[0]) for core in cores}
