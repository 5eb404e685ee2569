"""How much of the time leads to progress while ranks are killed: the same faults for several ways.

python benchmarks/goodput.py
python benchmarks/goodput.py --json goodput.json --plot docs/images/goodput.svg

Ways: pc.elastic; a script that saves each k steps and is started again as a whole; torchft over
Gloo, if it can be imported. The faults, kills of one rank each, follow from a seed. Work of a step
is that of 4 ranks for 50 ms: fewer ranks sleep for longer, or count for less where batches shrink.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import pycoll
from pycoll.bench.record import write_results

ROOT = Path(__file__).resolve().parents[1]
RANKS, STEP_S, WIDTH, BATCH = 4, 0.05, 256, 32
CALM_S = 4.0  # before the first kill
START_S = 90.0  # in which the first step must have been made
Progress = list[tuple[float, float]]  # time, and steps of all ranks so far


@dataclass(frozen=True, slots=True)
class Result:
    """What one way made of the time.

    Attributes:
        way: Its name.
        kills: Faults within the time.
        steps: Steps of all ranks that were not lost.
        step_ms: Median time of a step.
        goodput: Share of the time that the steps would have taken without faults.
        progress: Seconds since the first step, and steps until then.
    """

    way: str
    kills: int
    steps: float
    step_ms: float
    goodput: float
    progress: Progress


# --- the ranks ---


class Note:
    """Writes progress to a file, and this process's id to a folder when it has made a step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_known = folder, False

    def __call__(self, steps: float, is_first: bool) -> None:
        if not self._is_known:
            (self._folder / "pids" / str(os.getpid())).touch()
            self._is_known = True
        if is_first:
            with (self._folder / "progress").open("a") as file:
                file.write(f"{time.monotonic()} {steps}\n")


def model_of() -> Any:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


class Samples:
    """Random samples."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> Any:
        import torch

        draws = torch.Generator().manual_seed(i)
        return torch.randn(WIDTH, generator=draws), torch.tensor(i % 10)


def parts(mesh: Any) -> tuple[Any, Any, Any]:
    import torch

    from pycoll import parallel as pc

    model = pc.parallelize(model_of(), mesh)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return model, optimizer, pc.loader(Samples(), BATCH, mesh)


def train_elastic(folder: Path, note: Note) -> None:
    from torch.nn.functional import cross_entropy

    from pycoll import parallel as pc

    def build(mesh: Any) -> dict[str, Any]:
        return dict(zip(("model", "optimizer", "loader"), parts(mesh), strict=True))

    def train(job: Any) -> None:
        while True:
            for x, y in job.loader:
                job.model.step(x, y, loss=cross_entropy)
                time.sleep(STEP_S * RANKS / job.mesh.world.size)
                job.optimizer.step()
                job.commit()
                note(job.commits, job.mesh.world.rank == 0)

    pc.elastic(build, train)


def train_and_save(folder: Path, note: Note, every: int) -> None:
    from torch.nn.functional import cross_entropy

    from pycoll import parallel as pc

    mesh = pc.mesh()
    model, optimizer, loader = parts(mesh)
    state, step = {"loader": loader}, 0
    if any((folder / "saved").glob("*")):
        step = pc.load(folder / "saved", model, optimizer, state=state)
    while True:
        for x, y in loader:
            model.step(x, y, loss=cross_entropy)
            time.sleep(STEP_S)
            optimizer.step()
            step += 1
            if step % every == 0:
                pc.save(folder / "saved", model, optimizer, extra=step, state=state)
            note(step, mesh.world.rank == 0)


def train_torchft(folder: Path, note: Note) -> None:
    from datetime import timedelta

    import torch
    import torchft
    from torch import distributed, nn

    model = model_of()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    replica = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    draws = torch.Generator().manual_seed(os.getpid())
    while True:
        x = torch.randn(BATCH // RANKS, WIDTH, generator=draws)
        y = torch.randint(10, (len(x),), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(x), y).backward()
        time.sleep(STEP_S)
        optimizer.step()
        note(manager.batches_committed() / RANKS, manager.participating_rank() == 0)


# --- the faults ---


def trace(seed: int, seconds: float, every_s: float) -> list[tuple[float, float]]:
    """Times of kills after CALM_S, and for each a number in [0, 1) that says which rank."""
    draws, at, found = random.Random(seed), CALM_S, []
    while (at := at + draws.expovariate(1 / every_s)) < seconds:
        found.append((at, draws.random()))
    return found


def read(folder: Path) -> Progress:
    """The progress so far."""
    path = folder / "progress"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), float(steps)) for at, steps in map(str.split, lines)]


def living(folder: Path) -> list[int]:
    """Processes that have made a step and have not ended."""
    found = []
    for pid in sorted(int(path.name) for path in (folder / "pids").iterdir()):
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found += [pid] if state != "Z" else []
    return found


def disturb(
    folder: Path, commands: Sequence[list[str]], kills: list[tuple[float, float]], seconds: float
) -> Progress:
    """Runs commands, starts again those that end, and kills ranks at the given times."""
    left = list(kills)
    log = (folder / "log").open("w")

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    running, first = [start(command) for command in commands], 0.0
    began_s, give_up_s = 0.0, time.monotonic() + START_S
    try:
        while not began_s or time.monotonic() < began_s + seconds:
            if not began_s and len(living(folder)) == RANKS and (found := read(folder)):
                began_s, first = found[-1]
            if not began_s and time.monotonic() > give_up_s:
                raise TimeoutError(f"no step within {START_S:g} s:\n{(folder / 'log').read_text()}")
            for i, process in enumerate(running):
                if process.poll() is not None:
                    running[i] = start(commands[i])
            is_due = began_s and left and time.monotonic() > began_s + left[0][0]
            if is_due and (pids := living(folder)):
                os.kill(pids[int(left.pop(0)[1] * len(pids))], signal.SIGKILL)
            time.sleep(0.01)
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in living(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        log.close()
    ends_s = began_s + seconds
    return [(at - began_s, steps - first) for at, steps in read(folder) if began_s <= at < ends_s]


def result_of(
    way: str, progress: Progress, kills: list[tuple[float, float]], seconds: float
) -> Result:
    """Counts what is left of the steps at the end; a step's time is that before the first kill."""
    calm = [one for one in progress if not kills or one[0] < kills[0][0]]
    pairs = zip(calm, calm[1:], strict=False)
    steps_s = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs if b[1] > a[1]]
    step_s, steps = statistics.median(steps_s), progress[-1][1]
    return Result(way, len(kills), steps, 1e3 * step_s, steps * step_s / seconds, progress)


def measure(way: str, kills: list[tuple[float, float]], seconds: float) -> Result:
    """Runs one way."""
    kind, _, every = way.partition(" ")
    with tempfile.TemporaryDirectory(prefix="goodput") as name:
        folder = Path(name)
        (folder / "pids").mkdir()
        script = [
            str(Path(__file__)),
            "--rank",
            kind,
            "--folder",
            name,
            "--save-each",
            every or "0",
        ]
        launch = [sys.executable, "-m", "pycoll", "run", "-n", str(RANKS)]
        if kind == "elastic":
            launch[-2:] = ["--elastic", f"1:{RANKS}", "--restarts", "100000"]
        if kind != "torchft":
            return result_of(
                way, disturb(folder, [launch + script], kills, seconds), kills, seconds
            )
        os.environ["RUST_LOG"] = "off"
        from torchft.coordination import LighthouseServer

        house = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000
        )
        os.environ["TORCHFT_LIGHTHOUSE"] = house.address()
        try:
            commands = [[sys.executable, *script]] * RANKS
            return result_of(way, disturb(folder, commands, kills, seconds), kills, seconds)
        finally:
            house.shutdown()


# --- the report ---


def table(results: list[Result]) -> str:
    """As in the document."""
    names = {"elastic": "`pc.elastic`, a commit each step", "torchft": "torchft 0.2 over Gloo"}
    lines = ["| way | kills | steps | ms per step | goodput |", "|---|---|---|---|---|"]
    for of in results:
        name = names.get(of.way, f"`pc.save` every {of.way.split()[-1]} steps, restart")
        lines.append(
            f"| {name} | {of.kills} | {of.steps:.0f} | {of.step_ms:.1f} | {of.goodput:.1%} |"
        )
    return "\n".join(lines)


def plot(results: list[Result], kills: list[tuple[float, float]], path: Path) -> None:
    """Draws progress over time, with the kills."""
    from pycoll.draw.style import chunk_colors, matplotlib_module, render

    matplotlib_module()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for of, color in zip(results, chunk_colors(len(results)), strict=True):
        label = f"{of.way.replace('save', 'save every')}: {of.goodput:.0%}"
        axes.plot(*zip(*of.progress, strict=True), color=color, label=label)
    for at, _ in kills:
        axes.axvline(at, color="0.8", linewidth=0.8, zorder=0)
    axes.set_xlabel("seconds; a rank is killed at each grey line")
    axes.set_ylabel("steps that are not lost")
    axes.legend(fontsize=8)
    path.write_bytes(render(figure, path.suffix.lstrip(".")))


def main(
    seconds: Annotated[float, typer.Option(help="Of each way.")] = 60.0,
    every: Annotated[float, typer.Option(help="Mean seconds between kills.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Of the kills.")] = 1,
    ways: Annotated[
        str, typer.Option(help="elastic; 'save K', each K steps; torchft.")
    ] = "elastic,save 10,save 50,torchft",
    json_path: Annotated[Path | None, typer.Option("--json", help="Writes a record.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draws .svg or .png.")] = None,
    rank: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path, typer.Option(hidden=True)] = ROOT,
    save_each: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Measure all ways, one after the other, and print a table."""
    if rank:
        trains: dict[str, Callable[[], None]] = {
            "elastic": lambda: train_elastic(folder, Note(folder)),
            "save": lambda: train_and_save(folder, Note(folder), save_each),
            "torchft": lambda: train_torchft(folder, Note(folder)),
        }
        try:
            return trains[rank]()
        except pycoll.Error as error:  # a traceback with all locals takes seconds
            raise SystemExit(str(error)) from None
    kills, results = trace(seed, seconds, every), []
    for way in ways.split(","):
        if way == "torchft" and importlib.util.find_spec("torchft") is None:
            typer.echo("torchft is not installed: left out", err=True)
            continue
        results.append(measure(way, kills, seconds))
        typer.echo(f"{way}: {json.dumps([results[-1].steps, results[-1].goodput])}", err=True)
    typer.echo(table(results))
    if json_path is not None:
        write_results(json_path, results)
    if plot_path is not None:
        plot(results, kills, plot_path)
    return None


if __name__ == "__main__":
    typer.run(main)
