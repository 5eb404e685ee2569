"""Mutated topologies and tuning tables: the values that the file has, or one clear error.

A topology (odd seeds) is compared with what a reader of its own makes of the same TOML. A tuning
table (even seeds) is the saved one or none; a killed `tuning.save` leaves nothing behind.
"""

from __future__ import annotations

import functools
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from isolated import run_isolated
from odd_values import MAX_TEXT

import pycoll
from injections import Outcome
from pycoll import _core, topology, tuning

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = 3000
FEW = tuple(range(1, 21))
DEADLINE_S = 20.0
MEMORY = 4 << 30
ROOT = Path(pycoll.__file__).parents[1]
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9} | {
    f"{prefix}{unit}_per_s": scale * factor
    for prefix, scale in {"t": 1e12, "g": 1e9, "m": 1e6}.items()
    for unit, factor in {"bit": 1 / 8, "b": 1.0}.items()
}
TOKENS = (
    "-1", "0", "1e999", "nan", "inf", "-inf", "2147483647", "2147483648", "9" * 40, "0.5", "true",
    "[]", "[1, 2]", "{}", "{a=1}", '"text"', "''", "1979-05-27", "07:32:00", "[[1]]", "0x10", "1_0",
    '"\\u0000"', '"\\u001b[31m"', "é", "\ufeff", "\x00", "[" * 3000, '"' + "x" * 100_000 + '"',
)  # fmt: skip


def mutate(rng: random.Random, data: bytes) -> bytes:
    """The file after one to three changes of the kinds that editors, copies and disks make."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        lines = data.split(b"\n")
        at, line = rng.randrange(len(data) + 1), rng.randrange(len(lines))
        kind = rng.choice(
            ("bit", "cut", "noise", "drop", "double", "swap", "number", "token", "key")
        )
        if kind == "bit" and data:
            changed = bytearray(data)
            changed[at % len(data)] ^= 1 << rng.randrange(8)
            data = bytes(changed)
        elif kind == "cut":
            data = data[:at]
        elif kind == "noise":
            data = data[:at] + rng.randbytes(rng.choice((1, 4, 100))) + data[at:]
        elif kind == "drop":
            data = b"\n".join(lines[:line] + lines[line + 1 :])
        elif kind == "double":
            data = b"\n".join([*lines[: line + 1], *lines[line:]])
        elif kind == "swap":
            other = rng.randrange(len(lines))
            lines[line], lines[other] = lines[other], lines[line]
            data = b"\n".join(lines)
        else:
            pattern = {"number": rb"\d+(\.\d+)?", "token": rb"(?<== ).+", "key": rb"\w+"}[kind]
            found = list(re.finditer(pattern, data))
            if found:
                place = rng.choice(found)
                data = data[: place.start()] + rng.choice(TOKENS).encode() + data[place.end() :]
    return data


# Topologies.


def quantity(table: dict[str, Any], name: str, default: Any) -> Any:
    """The value of NAME_UNIT in seconds or bytes per second, lists within lists as tuples."""

    def scaled(value: Any) -> Any:
        return tuple(map(scaled, value)) if isinstance(value, list) else value * UNITS[unit]

    for key, value in table.items():
        unit = key.removeprefix(name + "_")
        if unit != key and unit in UNITS:
            return scaled(value)
    return default


def expected_of(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of the topology that a table of TOML describes."""
    ranks, jitter = content.get("ranks", {}), content.get("jitter", {})
    rate = quantity(ranks, "reduce", None)
    return {
        "name": content.get("name", ""),
        "overhead_s": quantity(ranks, "overhead", 0.0),
        "gamma_s_per_byte": 1 / rate if rate else 0.0,
        "levels": [
            {
                "name": level["name"],
                "size": level["size"],
                "link_bytes_per_s": quantity(level, "link", None),
                "latency_s": quantity(level, "latency", 0.0),
                "num_links": level.get("num_links", 1),
                "rails": level.get("rails", False),
                "carries_outside": level.get("carries_outside", True),
                "pair_bytes_per_s": quantity(level, "pair", None),
                "pair_latency_s": quantity(level, "pair_latency", None),
            }
            for level in content["level"]
        ],
        "stragglers": [
            {
                "level": one["level"],
                "units": tuple(one["units"]),
                "compute_factor": one.get("compute_factor", 1.0),
                "link_factor": one.get("link_factor", 1.0),
                "delay_s": quantity(one, "delay", 0.0),
            }
            for one in content.get("straggler", [])
        ],
        "jitter": {
            "seed": jitter.get("seed", 0),
            "message_s": quantity(jitter, "message", 0.0),
            "start_s": quantity(jitter, "start", 0.0),
        },
    }


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    if isinstance(expected, dict):
        return [
            text
            for name, value in expected.items()
            for text in differences(value, getattr(found, name), f"{where}.{name}")
        ]
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return [f"{where}: {len(found)} entries, expected {len(expected)}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [text for i, pair in pairs for text in differences(*pair, f"{where}[{i}]")]
    if isinstance(expected, float) or isinstance(found, float):
        same = math.isclose(expected, found, rel_tol=1e-12)
    else:
        same = expected == found
    return [] if same else [f"{where} is {found!r}, expected {expected!r}"]


def check_topology(rng: random.Random, folder: Path) -> str:
    original = rng.choice(sorted((ROOT / "examples" / "topologies").glob("*.toml")))
    path = folder / "cluster.toml"
    data = mutate(rng, original.read_bytes())
    path.write_bytes(data)
    begin_s = time.process_time()
    try:
        found = topology.load(path)
    except pycoll.UsageError as error:
        return refused_well(str(error), "cluster.toml")
    finally:
        took_s = time.process_time() - begin_s
    if took_s > 5:
        return f"{took_s:.1f} s of CPU for a file of {len(data)} bytes"
    wrong = differences(expected_of(tomllib.loads(data.decode())), found)
    return "; ".join(wrong)[:300]


def refused_well(text: str, name: str) -> str:
    if len(text) > MAX_TEXT:
        return f"a text of {len(text)} characters: {text[:100]!r}"
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        return f"control characters in {text!r}"
    return "" if name in text else f"without {name}: {text!r}"


# Tuning tables.


def rows_of(table: _core.TuningTable) -> str:
    return _core.TuningTable(table.costs, table.sizes).to_text()


def make_rows(rng: random.Random) -> tuple[list[Any], list[Any]]:
    date = tuning.today()
    costs = [
        _core.TunedCost(n, 2, "plain", date, "simple", 1e-6, rng.random() * 1e-9, 1e-11)
        for n in (2, 4)
    ]
    sizes = [
        _core.TunedSize("all_reduce", 2, 2, "plain", nbytes, date, {"ring/simple": rng.random()})
        for nbytes in (64, 4096)
    ]
    return costs, sizes


def sum_of_one(comm: pycoll.Communicator) -> float:
    return float(comm.all_reduce(np.ones(3))[0])


def check_table(rng: random.Random, folder: Path) -> str:
    os.environ["PYCOLL_CACHE_DIR"] = str(folder)
    path = tuning.save(*make_rows(rng))
    saved = rows_of(tuning.load()[0])
    data = mutate(rng, path.read_bytes())
    path.write_bytes(data)
    table, note = tuning.load()
    if rows_of(table) == rows_of(_core.TuningTable([], [])):
        wrong = refused_well(note, path.name)
    else:
        wrong = "" if rows_of(table) == saved else "another table is loaded"
    if not wrong and pycoll.run_ranks(sum_of_one, 1, threads=True) != [1.0]:
        wrong = "a job beside the table does not work"
    return wrong or check_killed_save(rng, folder)


def check_killed_save(rng: random.Random, folder: Path) -> str:
    pid = os.fork()
    if pid == 0:
        while True:
            tuning.save(*make_rows(rng))
    time.sleep(rng.uniform(0, 0.005))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    path = tuning.save(*make_rows(rng))
    left = {each.name for each in folder.iterdir()} - {path.name, path.with_suffix(".lock").name}
    if left:
        return f"left behind by a killed save and the next: {sorted(left)}"
    return "" if len(tuning.load()[0].sizes) == 2 else "the table is not whole after a kill"


def run_here(seed: int) -> str:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        return (check_topology if seed % 2 else check_table)(rng, Path(name))


def run_case(seed: int) -> Outcome:
    complaint, crash = run_isolated(functools.partial(run_here, seed), DEADLINE_S)
    return Outcome(crash[-500:] or complaint, label="topologies" if seed % 2 else "tables")
