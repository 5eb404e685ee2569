"""Clusters from TOML files, with errors that name the key and suggest a correction."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycoll.arguments import short_name, shown
from pycoll.arguments import text as checked_text
from pycoll.errors import UsageError
from pycoll.topology.device import Device
from pycoll.topology.model import Jitter, Level, Pairs, Straggler, Topology

__all__ = ["load", "loads"]

# Units at the end of a key's name, in seconds or in bytes per second.
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATES = {
    "tbit_per_s": 1e12 / 8,
    "gbit_per_s": 1e9 / 8,
    "mbit_per_s": 1e6 / 8,
    "tb_per_s": 1e12,
    "gb_per_s": 1e9,
    "mb_per_s": 1e6,
}
_OPERATIONS = {"tflop_per_s": 1e12, "gflop_per_s": 1e9}
_CAPACITIES = {"gb": 1e9, "gib": 2.0**30, "mib": 2.0**20}


def load(path: str | Path) -> Topology:
    """Reads a cluster from a TOML file; docs/simulation.md lists the keys.

    Args:
        path: path of the file.

    Returns:
        The topology.

    Raises:
        UsageError: the file is missing or not TOML, a key is unknown, missing or of the wrong
            type, or a number is invalid. The message names the file, the table and the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the topology {path}: {error}") from error
    return loads(text, source=str(path))


def loads(text: str, *, source: str = "topology") -> Topology:
    """Reads a cluster from TOML text, as load() does from a file.

    Args:
        text: TOML.
        source: name of the text's origin, for messages.

    Returns:
        The topology.

    Raises:
        UsageError: as load() does.
    """
    text, source = checked_text(text, "text"), checked_text(source, "source")
    if sys.version_info >= (3, 11):  # a local import, which keeps `import pycoll` fast
        import tomllib
    else:
        import tomli as tomllib
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of many digits, deep lists
        raise UsageError(f"{source} is not TOML: {shown(str(error))[1:-1]}") from None
    try:
        return _topology(_Table(content, source))
    except UsageError as error:
        what = str(error)
        raise UsageError(what if what.startswith(source) else f"{source}: {what}") from None


class _Table:
    """A table of the file; every key must be read before refuse_unknown()."""

    def __init__(self, content: Any, where: str) -> None:
        self.where = where
        if not isinstance(content, Mapping):
            raise UsageError(f"{where}: expected a table, got {shown(content)}")
        self._content = dict(content)
        self._known: list[str] = []
        self._named: list[str] = []  # for messages: a unit stands for all

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Returns the key's value, or `default`; raises for a missing key when that is `...`."""
        self._known.append(key)
        self._named.append(key)
        if key not in self._content:
            if default is ...:
                self._refuse_misspelt([key])
                raise UsageError(f"{self.where}: {shown(key)} is missing")
            return default
        value = self._content[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = {int: "a whole number", float: "a number", str: "text", list: "a list"}
            names |= {bool: "true or false", dict: "a table"}
            raise UsageError(f"{self.where}: {key}: expected {names[kinds[0]]}, got {shown(value)}")
        return value

    def quantity(self, name: str, units: dict[str, float], default: Any = None) -> Any:
        """`name` with one of the units at its end, in seconds or bytes per second; numbers may be
        nested in lists."""
        keys = {f"{name}_{unit}": factor for unit, factor in units.items()}
        self._known += keys
        self._named.append(f"{name}_{next(iter(units))}")
        found = [key for key in keys if key in self._content]
        if len(found) > 1:
            raise UsageError(f"{self.where}: {' and '.join(found)} say the same: keep one")
        if not found:
            if default is not ...:
                return default
            if name in self._content:
                raise UsageError(
                    f"{self.where}: {name!r} has no unit: expected one of {', '.join(keys)}"
                )
            self._refuse_misspelt(list(keys))
            raise UsageError(
                f"{self.where}: {name!r} is missing: expected one of {', '.join(keys)}"
            )
        return self._scaled(found[0], self._content[found[0]], keys[found[0]])

    def tables(self, key: str) -> list[_Table]:
        """The tables of `[[key]]`."""
        entries = self.get(key, list, [])
        return [
            _Table(entry, f"{self.where}: [[{key}]] {i + 1}") for i, entry in enumerate(entries)
        ]

    def table(self, key: str) -> _Table:
        """The table `[key]`, or an empty one."""
        return _Table(self.get(key, dict, {}), f"{self.where}: [{key}]")

    def refuse_unknown(self) -> None:
        """Raises UsageError for a key that was not read."""
        for key in self._content:
            if key in self._known:
                continue
            units = [k for k in self._known if k.startswith(f"{key}_")]
            if units:
                raise UsageError(
                    f"{self.where}: {shown(key)} has no unit: expected one of {', '.join(units)}"
                )
            near = _nearest(key, self._known, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(self._named)}"
            raise UsageError(f"{self.where}: unknown key {shown(key)}: {hint}")

    def _refuse_misspelt(self, missing: list[str]) -> None:
        """Raises UsageError if a key looks like one of those that are missing."""
        for key in self._content:
            near = _nearest(key, missing, cutoff=0.7)
            if near and key not in self._known:
                raise UsageError(
                    f"{self.where}: unknown key {shown(key)}: did you mean {near[0]!r}?"
                )

    def _scaled(self, key: str, value: Any, factor: float) -> Any:
        if isinstance(value, list):
            return tuple(self._scaled(key, entry, factor) for entry in value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{self.where}: {key}: expected a number, got {shown(value)}")
        if not 0 <= value < float("inf"):
            raise UsageError(
                f"{self.where}: {key}: expected a number of at least 0, got {shown(value)}"
            )
        return value * factor


def _nearest(key: str, known: list[str], cutoff: float) -> list[str]:
    import difflib

    return difflib.get_close_matches(key, known, n=1, cutoff=cutoff)


def _topology(file: _Table) -> Topology:
    name = _name(file, "name", "")
    ranks = file.table("ranks")
    overhead_s = _number(ranks, "overhead", _TIMES, 0.0)
    reduces = _number(ranks, "reduce", _RATES, None)
    ranks.refuse_unknown()
    levels = tuple(_level(table) for table in file.tables("level"))
    stragglers = tuple(_straggler(table) for table in file.tables("straggler"))
    jitter = _jitter(file.table("jitter"))
    device = _device(file.table("device")) if file.get("device", dict) else None
    file.refuse_unknown()
    if not levels:
        raise UsageError(f"{file.where}: expected at least one [[level]], from the inside out")
    if reduces == 0:
        raise UsageError(f"{ranks.where}: reduce: expected a rate above 0")
    return Topology(
        name=name,
        levels=levels,
        overhead_s=overhead_s,
        gamma_s_per_byte=1 / reduces if reduces else 0.0,
        stragglers=stragglers,
        jitter=jitter,
        device=device,
    )


def _device(table: _Table) -> Device:
    capacity = _number(table, "capacity", _CAPACITIES, None)
    device = Device(
        name=_name(table, "name", "device"),
        flops_per_s=_number(table, "compute", _OPERATIONS, ...),
        memory_bytes_per_s=_number(table, "memory", _RATES, ...),
        attained=_factor(table, "attained"),
        capacity_bytes=None if capacity is None else int(capacity),
        operator_s=_number(table, "operator", _TIMES, 0.0),
    )
    table.refuse_unknown()
    return device


def _level(table: _Table) -> Level:
    name = _name(table, "name")
    table.where = f"{table.where} ({name})"
    size = table.get("size", int, ...)
    level = Level(
        name=name,
        size=size,
        link_bytes_per_s=_number(table, "link", _RATES, ...),
        latency_s=_number(table, "latency", _TIMES, 0.0),
        num_links=table.get("num_links", int, 1),
        rails=table.get("rails", bool, False),
        carries_outside=table.get("carries_outside", bool, True),
        pair_bytes_per_s=_pairs(table, "pair", _RATES, size),
        pair_latency_s=_pairs(table, "pair_latency", _TIMES, size),
    )
    table.refuse_unknown()
    return level


def _straggler(table: _Table) -> Straggler:
    level = _name(table, "level")
    units = table.get("units", list, ...)
    if not units or not all(isinstance(u, int) and not isinstance(u, bool) for u in units):
        raise UsageError(
            f"{table.where}: units: expected numbers such as [3, 17], got {shown(units)}"
        )
    straggler = Straggler(
        level=level,
        units=tuple(units),
        compute_factor=_factor(table, "compute_factor"),
        link_factor=_factor(table, "link_factor"),
        delay_s=_number(table, "delay", _TIMES, 0.0),
    )
    table.refuse_unknown()
    return straggler


def _jitter(table: _Table) -> Jitter:
    jitter = Jitter(
        seed=table.get("seed", int, 0),
        message_s=_number(table, "message", _TIMES, 0.0),
        start_s=_number(table, "start", _TIMES, 0.0),
    )
    table.refuse_unknown()
    if jitter.seed < 0:
        raise UsageError(f"{table.where}: seed: expected a number of at least 0, got {jitter.seed}")
    return jitter


def _name(table: _Table, key: str, default: Any = ...) -> str:
    """A text that error messages and titles repeat."""
    name = short_name(table.get(key, str, default), f"{table.where}: {key}")
    if not name.isprintable():
        raise UsageError(f"{table.where}: {key}: expected printable text, got {shown(name)}")
    return name


def _number(table: _Table, name: str, units: dict[str, float], default: Any) -> Any:
    value = table.quantity(name, units, default)
    if isinstance(value, tuple):
        raise UsageError(f"{table.where}: {name}: expected one number, got {len(value)}")
    return value


def _factor(table: _Table, key: str) -> float:
    value = float(table.get(key, (float, int), 1.0))
    if not 0 < value < float("inf"):
        raise UsageError(f"{table.where}: {key}: expected a number above 0, got {value:g}")
    return value


def _pairs(table: _Table, name: str, units: dict[str, float], size: int) -> Pairs | None:
    value = table.quantity(name, units, None)
    if value is None:
        return None
    rows = value if isinstance(value, tuple) else ()
    if len(rows) != size or not all(_is_row(row, size) for row in rows):
        raise UsageError(
            f"{table.where}: {name}: expected {size} x {size} numbers, a row per source"
        )
    return rows


def _is_row(row: Any, size: int) -> bool:
    return isinstance(row, tuple) and len(row) == size and tuple not in map(type, row)
