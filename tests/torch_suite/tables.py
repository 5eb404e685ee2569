"""The tables of docs/torch.md, from what was recorded: outcomes.jsonl and features.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from suite_client import WORLD_SIZES, Row

from pycoll.bench.record import Record, by_library

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "torch.md"
BACKENDS = ("gloo", "pycoll")
VIEWS = {
    "gloo": "tests that torch runs for Gloo on a machine without a GPU",
    "gloo on GPUs": "tests that it runs for Gloo with GPUs (most of DDP), their GPUs being the CPU",
    "mpi": "tests that it keeps for MPI",
    "nccl on GPUs": "tests that it keeps for NCCL, their GPUs being the CPU",
}


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---", *[":-:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def counts(rows: list[Row]) -> str:
    """Passed tests per view and world size: Gloo, then pycoll."""
    lines = []
    for view, text in VIEWS.items():
        mine = [row for row in rows if row.view == view]
        cells = [
            " → ".join(str(sum(row.passes(backend, n) for row in mine)) for backend in BACKENDS)
            for n in WORLD_SIZES
        ]
        lines.append([f"{text} ({len(mine)})", *cells])
    total = [
        " → ".join(f"**{sum(row.passes(b, n) for row in rows)}**" for b in BACKENDS)
        for n in WORLD_SIZES
    ]
    lines.append([f"all ({len(rows)})", *total])
    return markdown(["passed, Gloo → pycoll", *(f"{n} ranks" for n in WORLD_SIZES)], lines)


def not_passed(rows: list[Row]) -> str:
    """Why pycoll does not pass what it does not, the most common reason first."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        words = {word for word in row.outcomes["pycoll"].values() if word != "pass"}
        if len(words) and not any(row.passes("pycoll", n) for n in WORLD_SIZES):
            reasons.setdefault(sorted(words)[0], []).append(row.test)
    lines = []
    for word, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
        outcome, _, reason = word.partition(": ")
        names = f"`{tests[0]}`" if len(tests) == 1 else f"{len(tests)} tests"
        lines.append(f"- {names}: {'skipped' if outcome == 'skip' else 'fails'}: {reason}\n")
    return "".join(lines)


def words_for(name: str) -> str:
    return name.replace("_", " ").replace("ddp", "DDP").replace("fsdp2", "FSDP2")


def cell(word: str) -> str:
    return "✓" if word == "works" else f"✗ {word.replace('|', '/')}"


def all_but(words: dict[str, str]) -> str:
    bad = [name for name, word in words.items() if word != "works"]
    return f"not {', '.join(bad)}" if bad else "all"


def of_dtypes(results: dict[str, Any]) -> str:
    """A line for each collective, then one for the ops of each that has them."""
    labels = {key.split()[0]: f"`{key.split()[0]}`" for key in results["gloo"]["collectives"]}
    labels["send_and_recv"] = "`send`, `recv`"
    rows = [("collectives", *item) for item in labels.items()]
    for name in ("all_reduce", "reduce_scatter_tensor"):
        rows.append(("ops", name, f"ops of `{name}`"))
    lines = []
    for part, name, label in rows:
        cells = []
        for backend in BACKENDS:
            found = (key.split() + [word] for key, word in results[backend][part].items())
            cells.append(all_but({what: word for of, what, word in found if of == name}))
        lines.append([label, *cells])
    return markdown(["", "Gloo", "pycoll"], lines)


def of_features(results: dict[str, Any]) -> str:
    names = results["gloo"]["rest"]
    rows = ([words_for(n), *(cell(results[b]["rest"][n]) for b in BACKENDS)] for n in names)
    return markdown(["", "Gloo", "pycoll"], rows)


def newest_speeds() -> Path:
    """The last record of benchmarks/torch_compare.py."""
    return max((HERE.parents[1] / "benchmarks" / "results").glob("torch-*.json"))


def size_name(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def of_speed(path: Path) -> str:
    """Times and ratios by size, then a step of DDP."""
    record = Record.load(path)
    names = {
        "gloo": "Gloo",
        "pycoll": "pycoll",
        "pycoll once": "tensor not seen before",
        "allocate_tensor": "`allocate_tensor`",
        "comm": "`comm.all_reduce`",
        "torch": "torch alone",
    }
    facts = record.facts["machine"]
    text = (
        f"Measured on {facts['cpu']}, {facts['cores']} cores, torch "
        f"{record.facts['torch']}, commit "
        f"{facts['commit'][:10]}: microseconds, the median of the slowest rank.\n"
    )
    for n, step in record.facts["ddp_step_ms"].items():
        lines = []
        for rows in record.messages():
            if rows[0].case.num_ranks != int(n):
                continue
            us = {name: timing.median_s * 1e6 for name, timing in by_library(rows).items()}
            cells = [three_digits(us[name]) for name in names]
            ratio = f"{us['gloo'] / us['pycoll']:.1f}"
            lines.append([size_name(rows[0].case.nbytes), *cells, ratio])
        head = [f"all_reduce, {n} ranks", *names.values(), "Gloo / pycoll"]
        text += f"\n{markdown(head, lines)}\nA step of DDP, 25 million parameters, "
        text += f"{n} ranks: Gloo {step['gloo']:.0f} ms, pycoll "
        text += f"{step['pycoll']:.0f} ms: {step['gloo'] / step['pycoll']:.2f} times as fast. "
        text += f"Without communication it takes {step['none']:.0f} ms.\n"
    return text


def tables(head: dict, rows: list[Row]) -> dict[str, str]:
    """By the name between the marks in the document."""
    results = json.loads((HERE / "features.json").read_text())
    return {
        "dtypes": of_dtypes(results),
        "features": of_features(results),
        "suite": counts(rows),
        "reasons": not_passed(rows),
        "speed": of_speed(newest_speeds()),
    }


def filled(text: str, parts: dict[str, str]) -> str:
    """The document with these tables between its marks."""
    for name, table in parts.items():
        mark = rf"(<!-- table {name}: generated -->\n)(.*?)(<!-- end of table -->\n)"
        text, found = re.subn(mark, lambda m, t=table: m[1] + t + m[3], text, flags=re.DOTALL)
        assert found == 1, name
    return text
