"""The measured table: times of algorithms and protocols on this machine, and where it is kept.

A communicator's rank 0 reads the table when the communicator is made (csrc/comm/settings.h), and
all its ranks choose by it. `pycoll tune` makes it: `measure` runs on every rank, `fit_costs` finds
the costs that the simulation needs, and `save` puts what was found into the file.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pycoll import _core
from pycoll.errors import SystemError, UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

_MAX_CALLS = 2000  # of one batch
_FIT_STEPS = 2000
_FEW_ROUNDS = 5  # after them, candidates that are far behind get no more


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: Batches of calls of each candidate, one candidate after another in each round.
        batch_s: About how long one batch takes, seconds.
        limit_s: No further round begins after so many seconds of one size, beyond the first five.
        margin: A candidate so many times slower than the best after five rounds is left behind.
    """

    rounds: int = 25
    batch_s: float = 0.4e-3
    limit_s: float = 4.0
    margin: float = 1.5


@dataclass(frozen=True, slots=True)
class Measured:
    """One size on all ranks.

    Attributes:
        collective: Its name.
        nbytes: Size of the message, bytes.
        rounds_s: For each choice (ALGORITHM/PROTOCOL) the seconds per call of the slowest rank,
            one for each round; a choice that was left behind has fewer.
    """

    collective: str
    nbytes: int
    rounds_s: Mapping[str, list[float]]

    def times_s(self) -> dict[str, float]:
        """Seconds per call of each choice, the fastest first.

        The lower quartile of the rounds: what disturbs a round only ever makes it longer, and may
        disturb more than half of them.
        """
        times = {choice: lower_quartile(rounds) for choice, rounds in self.rounds_s.items()}
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def behind(self, choice: str) -> float:
        """How many times longer `choice` takes than the best of all."""
        times = self.times_s()
        return times[choice] / min(times.values())


def lower_quartile(values: list[float]) -> float:
    """A quarter of the values, or one, is not above it."""
    return sorted(values)[(len(values) - 1) // 4]


def spread_ranks(comm: Communicator) -> None:
    """New processes begin on their parent's core; one that wakes up is put on an idle one."""
    for _ in range(20):
        time.sleep(0.005)
        comm.barrier()


def measure(comm: Communicator, collective: str, nbytes: int, effort: Effort) -> Measured:
    """Times all that may be chosen for a size, interleaved. Collective.

    Args:
        comm: Of the ranks that take part.
        collective: Its name.
        nbytes: Size of the message, bytes; f32 elements.
        effort: How long to measure.

    Returns:
        The same on every rank.

    Raises:
        As the collective.

    Cost: about rounds * candidates * batch_s, and at least 15 calls of each candidate.
    """
    import numpy as np

    x = np.zeros(max(1, nbytes // 4), np.float32)
    out = np.zeros_like(x)

    def slowest(choices: list[str], num_calls: Mapping[str, int]) -> list[float]:
        own = [
            _core.time_calls(comm, collective, x, out, choice, num_calls[choice])
            for choice in choices
        ]
        all_ranks = np.array(own)
        comm.all_reduce(all_ranks, "max")
        return [float(t) for t in all_ranks]

    live = []
    for choice in _core.choices(collective, x.nbytes):
        # Some algorithms do not exist for every number of ranks: all ranks are told so alike.
        with suppress(UsageError):
            _core.time_calls(comm, collective, x, out, choice, 1)
            live.append(choice)
    once_s = slowest(live, dict.fromkeys(live, 1))
    num_calls = {
        choice: min(max(1, int(effort.batch_s / max(t, 1e-9))), _MAX_CALLS)
        for choice, t in zip(live, once_s, strict=True)
    }
    rounds_s: dict[str, list[float]] = {choice: [] for choice in live}
    spent_s = 0.0
    for round_idx in range(effort.rounds):
        if round_idx >= _FEW_ROUNDS and spent_s > effort.limit_s:
            break
        if round_idx == _FEW_ROUNDS:
            # By their best rounds: a disturbance must not end a candidate's chances.
            least_s = {choice: min(rounds_s[choice]) for choice in live}
            limit_s = effort.margin * min(least_s.values())
            live = [choice for choice in live if least_s[choice] <= limit_s]
        # Who comes first in a round finds the caches as the last of the round before left them.
        turn = round_idx % len(live)
        order = live[turn:] + live[:turn]
        for choice, t in zip(order, slowest(order, num_calls), strict=True):
            rounds_s[choice].append(t)
            spent_s += t * (num_calls[choice] + 2)
    return Measured(collective, x.nbytes, rounds_s)


def smallest_nbytes(collective: str, n: int) -> int:
    """Of a message of f32 with an element in each block."""
    return 4 * next(r.blocks_per_message(n) for r in _core.collectives() if r.name == collective)


# Costs of the simulation.


def fit_costs(
    measured: Iterable[Measured], n: int, cores: int, date: str, max_nbytes: int = 4 << 20
) -> list[_core.TunedCost]:
    """Finds for each protocol the alpha, beta and gamma whose simulated times are nearest.

    Nearest is the smallest mean of about |log(simulated / measured)|: a factor counts alike at
    every size, and one odd measurement counts little.

    Args:
        measured: Of one number of ranks.
        n: Number of ranks.
        cores: That they share.
        date: Of the measurement.
        max_nbytes: Larger messages do not take part, bytes.

    Returns:
        A row for each protocol that was measured.

    Cost: about a second.
    """
    points: dict[str, list[tuple[str, str, int, float]]] = {}
    for size in measured:
        if size.nbytes > max_nbytes:
            continue
        for choice, time_s in size.times_s().items():
            algorithm, protocol = choice.split("/")
            points.setdefault(protocol, []).append(
                (size.collective, algorithm, size.nbytes, time_s)
            )
    return [
        _core.TunedCost(n, cores, date, protocol, *_fit(protocol, rows, n, cores))
        for protocol, rows in points.items()
    ]


def _fit(
    protocol: str, rows: list[tuple[str, str, int, float]], n: int, cores: int
) -> tuple[float, float, float]:
    predictor = _core.Predictor([row[:3] for row in rows], n, cores)

    def error(costs: tuple[float, float, float]) -> float:
        simulated = predictor.times(*costs)
        off = (math.log(max(s, 1e-12) / row[3]) for s, row in zip(simulated, rows, strict=True))
        return sum(math.hypot(x, 0.1) for x in off)  # smooth near 0, where abs has a kink

    # Random steps (a 1+1 evolution strategy): beta and gamma may nearly stand for each other, and
    # steps along the axes end in such a valley. The seed makes the result repeatable.
    rng = random.Random(0)
    best = _core.builtin_cost(protocol, n, cores)
    best_error = error(best)
    for step in range(_FIT_STEPS):
        if step % 250 == 0:
            stride = 1.0
        alpha, beta, gamma = (c * math.exp(stride * rng.gauss(0, 1)) for c in best)
        tried_error = error((alpha, beta, gamma))
        if tried_error < best_error:
            best, best_error = (alpha, beta, gamma), tried_error
            stride *= 1.5
        else:
            stride *= 0.92
        stride = max(stride, 0.01)
    return best


# The file.


def path() -> Path:
    """Where this machine's table lies.

    In PYCOLL_CACHE_DIR, else XDG_CACHE_HOME/pycoll, else HOME/.cache/pycoll.

    Raises:
        UsageError: None of the three is set.
    """
    found = _core.tuning_table_path()
    if not found:
        raise UsageError("set PYCOLL_CACHE_DIR to a folder for the table: HOME is not set")
    return Path(found)


def load() -> tuple[_core.TuningTable, str]:
    """This machine's table as it is in the file now.

    Returns:
        The table, empty when there is none of this version and machine; and where it is from, or
        why it is empty.
    """
    note = _core.tuning_table_note()
    if note == str(path()):
        with suppress(OSError, UnicodeDecodeError, UsageError):  # replaced meanwhile
            return _core.TuningTable.parse(path().read_text("ascii")), note
    return _core.TuningTable([], []), note


def save(costs: Iterable[_core.TunedCost], sizes: Iterable[_core.TunedSize]) -> Path:
    """Puts rows into this machine's table, in place of those they are newer than.

    Several processes may do so at once: each holds a lock while it reads the table, adds its rows
    and puts the new table in the old one's place. Who reads sees the old or the new one, whole.

    Args:
        costs: One for each protocol and number of ranks and cores.
        sizes: One for each collective, number of ranks and cores, and size.

    Returns:
        The file.

    Raises:
        SystemError: The folder or the file cannot be written.
    """
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            old, _ = load()
            text = _merged(old, costs, sizes).to_text()
            _replace(target, text)
    except OSError as error:
        raise SystemError(f"cannot write the table {target}: {error}") from error
    return target


def _merged(
    old: _core.TuningTable, costs: Iterable[_core.TunedCost], sizes: Iterable[_core.TunedSize]
) -> _core.TuningTable:
    def cost_key(row: _core.TunedCost) -> tuple[int, int, str]:
        return row.num_ranks, row.num_cores, row.protocol

    def size_key(row: _core.TunedSize) -> tuple[str, int, int, int]:
        return row.collective, row.num_ranks, row.num_cores, row.nbytes

    all_costs = {cost_key(row): row for row in (*old.costs, *costs)}
    all_sizes = {size_key(row): row for row in (*old.sizes, *sizes)}
    return _core.TuningTable(
        [all_costs[key] for key in sorted(all_costs)],
        [all_sizes[key] for key in sorted(all_sizes)],
    )


def _replace(target: Path, text: str) -> None:
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=target.stem + ".")
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    # Without it the folder may forget the new name when the machine loses power.
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def today() -> str:
    """The date of a row: `2026-11-21T14:30:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


__all__ = [
    "Effort",
    "Measured",
    "fit_costs",
    "load",
    "measure",
    "path",
    "save",
    "smallest_nbytes",
    "spread_ranks",
    "today",
]
