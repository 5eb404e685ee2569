"""The table of gpu_check.py: collectives on one device, against copies, gloo and NCCL.

python benchmarks/device_table.py cuda|threads RECORD.json SECONDS [--tiny]
    [--tests tests.json] [--latencies latencies.jsonl]

RECORD.json is written after every series; RECORD.png at the end, where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import device_bench
import device_peers
import nccl_graphs
from device_bench import Case

import pycoll
from pycoll import _core
from pycoll.bench.record import machine

SIZES = [8 * 4**k for k in range(13)] + [1 << 28]
TINY_SIZES = [8, 4096, 100_000]
REPLAY_SIZES = [8, 8192, 65536]


class Table:
    """The record of all series, on disk after each."""

    def __init__(self, path: Path, facts: dict[str, Any], until: float) -> None:
        self.path = path
        self.data: dict[str, Any] = {"complete": False} | facts | {"series": {}}
        self.until = until

    def add(self, name: str, measured: dict[str, Any]) -> None:
        self.data["series"][name] = measured
        note = f" ({measured['note']})" if "note" in measured else ""
        print(f"{name}{note}")
        for row in measured.get("rows", []):
            share = row.get("roofline_share")
            ends = f"  {share:6.1%} of the roofline" if share else ""
            about = f"  launch {row['launch_us']:.2f}, alone {row['end_to_end_us']:.2f}  " if (
                "launch_us" in row) else "  "  # fmt: skip
            print(f"  {row['nbytes']:>10} B {row['queued_us']:12.2f} us"
                  f"{about}{row.get('algorithm', '')}{ends}", flush=True)  # fmt: skip
        self.save()

    def time_left(self) -> float:
        return self.until - time.monotonic()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".json.new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)


def device_facts() -> dict[str, Any]:
    """Asked by another process: this one forks ranks, and must not have used the device."""
    return pycoll.run_ranks(lambda _: _core.device_info(), 1)[0]


def cases(tiny: bool, emulated: bool) -> list[Case]:
    """The most telling first, since time may end."""
    ranks = (2,) if tiny else (8, 2, 4)
    made = []
    for n in ranks:
        for dtype in ("f32", "bf16"):
            made += [Case(dtype, n, True, registered, emulated) for registered in (False, True)]
    # What FSDP and tensor parallelism call.
    for collective, op in (
        ("all_reduce", "avg"),
        ("reduce_scatter", "sum"),
        ("reduce_scatter", "avg"),
        ("all_gather", "sum"),
        ("all_to_all", "sum"),
    ):
        made.append(Case("bf16", ranks[0], True, True, emulated, collective, op))
    return made + [Case(dtype, 2, False, emulated=emulated) for dtype in ("f32", "bf16")]


def measure_all(table: Table, device: str, tiny: bool) -> None:
    emulated = device == "threads"
    found = device_bench.ceilings(1 << 20 if tiny else 1 << 30, emulated)
    ceiling = next(iter(found.values()))["copy"]
    table.data["ceilings_bytes_per_s"] = found
    table.data["copy_ceiling_bytes_per_s"] = ceiling
    for library, rates in found.items():
        said = rates if isinstance(rates, str) else ", ".join(
            f"{name} {rate / 1e12:.3f} TB/s" for name, rate in rates.items())  # fmt: skip
        print(f"{library}: {said}, read and write", flush=True)
    sizes = TINY_SIZES if tiny else SIZES
    for case in cases(tiny, emulated):
        name = f"pycoll, {case}"
        try:
            # The time of peers is kept.
            until = table.until - 0.3 * table.data["seconds"]
            table.add(name, device_bench.run_case(case, sizes, ceiling, until))
        except (pycoll.Error, AssertionError, ImportError) as error:
            table.add(name, {"note": f"failed: {error}"})
    for nbytes in REPLAY_SIZES[: 1 if tiny else None]:
        name = f"pycoll, all_reduce f32 2 threads replayed, {nbytes} B"
        try:
            us = device_bench.on_ranks(
                lambda comm, nbytes=nbytes: device_bench.replay(comm, nbytes, 5 if tiny else 50),
                2, True,
            )  # fmt: skip
            table.add(name, {"rows": [{"nbytes": nbytes, "queued_us": us}]})
        except pycoll.Error as error:
            table.add(name, {"note": f"failed: {error}"})
    for n in (2,) if tiny else (2, 4, 8):
        for dtype in ("f32", "bf16"):
            left = min(table.time_left(), 60.0)
            rows = nccl_graphs.run(n, dtype, sizes, left, emulated)
            table.add(f"NCCL in one process, all_reduce {dtype} {n} communicators replayed", rows)
    # pycoll once more, as torch.distributed calls it: a peer like the others.
    peers = ("nccl", "gloo") if emulated else ("nccl", "pycoll", "gloo")
    for backend in peers:
        for n in (2,) if tiny else (2, 8):
            for dtype in ("f32", "bf16"):
                # gloo stages in CPU memory: its long messages would take all the time.
                taken = [size for size in sizes if backend != "gloo" or size <= 1 << 25]
                tensors = "cpu" if emulated else "cuda"
                left = min(table.time_left(), 60.0)
                measured = (
                    device_peers.run(backend, tensors, dtype, n, taken, left)
                    if left > 5
                    else {"note": "no time was left"}
                )
                table.add(f"torch's {backend}, all_reduce {dtype} {n} processes", measured)


def draw(table: Table) -> str | None:
    """The picture beside the record. Returns why there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no picture: matplotlib is not installed"
    series = {name: got["rows"] for name, got in table.data["series"].items() if got.get("rows")}
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, rows in series.items():
        library, _, case = name.partition(", ")
        collective, dtype, n, *rest = case.split()
        groups.setdefault(f"{collective} {dtype}, {n} ranks", {})[" ".join([library, *rest])] = rows
    columns = min(len(groups), 3) or 1
    lines = -(-len(groups) // columns) or 1
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(5.2 * columns, 4.2 * lines), squeeze=False
    )
    for panel, (title, members) in zip(panels.flat, groups.items(), strict=False):
        for label, rows in members.items():
            panel.plot(
                [row["nbytes"] for row in rows], [row["queued_us"] for row in rows],
                marker="o", markersize=3, label=label,
            )  # fmt: skip
        panel.set(title=title, xlabel="bytes", ylabel="us", xscale="log", yscale="log")
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(groups) :]:
        panel.set_axis_off()
    figure.suptitle(f"all ranks on one device: {table.data['device']}")
    figure.tight_layout()
    figure.savefig(table.path.with_suffix(".png"), dpi=110)
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "threads"))
    parser.add_argument("record", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tests", type=Path, help="what `gpu_check --part test` wrote")
    parser.add_argument("--latencies", type=Path, help="what gpu_latency wrote, lines of JSON")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    facts = device_facts()
    if not facts["devices"]:
        raise SystemExit(f"device_table: no device here: {facts}")

    def read(path: Path | None) -> Any:
        return json.loads(path.read_text()) if path else None

    def read_rows(path: Path | None) -> Any:
        return [json.loads(line) for line in path.read_text().splitlines()] if path else None

    about = machine()
    about["commit"] = about["commit"] or os.environ.get("PYCOLL_COMMIT")
    data = {
        "device": facts["devices"][0]["name"],
        "emulated": options.device == "threads",  # its times say nothing of a GPU
        "devices": facts,
        "machine": about,
        "seconds": options.seconds,
        "tests": read(options.tests),
        "latencies": read_rows(options.latencies),
    }
    table = Table(options.record, data, until)
    measure_all(table, options.device, options.tiny)
    table.data["complete"] = True
    reason = draw(table)
    if reason is not None:
        table.data["picture"] = reason
        print(reason)
    table.save()
    print(f"gpu-check: wrote {options.record}")
    failed = [name for name, got in table.data["series"].items()
              if "pycoll" in name.partition(",")[0] and not got.get("rows")]  # fmt: skip
    if failed:
        raise SystemExit(f"gpu-check: not measured: {failed}")


if __name__ == "__main__":
    main()
