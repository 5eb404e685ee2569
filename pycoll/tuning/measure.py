"""Times the candidates for a message, interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pycoll import _core
from pycoll.bench.timing import BLOCK_S, calibrate
from pycoll.errors import UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

ARRAYS = ("plain", "mapped")  # NumPy's own, and those of Communicator.empty
AUTO = "auto"  # the candidate that pycoll chooses by itself
# After so many rounds, candidates that are so many times slower than the best get no more.
_FEW_ROUNDS = 5
_FEWER_ROUNDS, _FAR = 2, 3.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: Batches of calls of each candidate, one candidate after another in each round.
        batch_s: A batch takes at least so long, seconds.
        limit_s: No further round begins after so many seconds of one size, beyond the first five.
        margin: A candidate so many times slower than the best after five rounds is left behind.
    """

    rounds: int = 21
    batch_s: float = BLOCK_S
    limit_s: float = 1.5
    margin: float = 1.5

    def times(self, factor: int) -> Effort:
        """So many times as long."""
        return replace(self, rounds=self.rounds * factor, limit_s=self.limit_s * factor)


@dataclass(frozen=True, slots=True)
class Measured:
    """One size on all ranks.

    Attributes:
        collective: Its name.
        arrays: Kind of the arrays: plain or mapped.
        nbytes: Size of the message, bytes.
        rounds_s: For each choice (ALGORITHM/PROTOCOL, or AUTO) the seconds per call of the slowest
            rank, one for each round; a choice that was left behind has fewer.
        earlier: `rounds_s` of earlier visits to this size.
    """

    collective: str
    arrays: str
    nbytes: int
    rounds_s: Mapping[str, list[float]]
    earlier: tuple[Mapping[str, list[float]], ...] = ()

    def times_s(self) -> dict[str, float]:
        """Seconds per call of each choice, the fastest first.

        A visit counts by the lower quartile of its rounds: a disturbance only ever makes a round
        longer, and may hit more than half of them. Visits count by their geometric mean: a
        virtual machine's cores may be close to each other in one and far apart in another, and
        what is good in both is better than what is best in one.
        """
        visits = (*self.earlier, self.rounds_s)
        times = {
            choice: statistics.geometric_mean(lower_quartile(visit[choice]) for visit in visits)
            for choice in self.rounds_s
            if all(choice in visit for visit in visits)
        }
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def after(self, earlier: Measured) -> Measured:
        """This visit and those before it."""
        return replace(self, earlier=(*earlier.earlier, earlier.rounds_s))

    def best(self) -> str:
        """The fastest choice, AUTO aside."""
        return next(choice for choice in self.times_s() if choice != AUTO)

    def behind(self, choice: str) -> float:
        """How many times longer `choice` takes than the best one."""
        times = self.times_s()
        return times[choice] / times[self.best()]

    def paired(self, choice: str, other: str) -> float:
        """How many times longer `choice` takes than `other`: the median of the rounds' ratios.

        Both ran within a few milliseconds in each round, so that what slows the machine for longer
        slows both.
        """
        pairs = zip(self.rounds_s[choice], self.rounds_s[other], strict=False)
        return statistics.median(mine / its for mine, its in pairs)


def lower_quartile(values: list[float]) -> float:
    """A quarter of the values, or one, is not above it."""
    return sorted(values)[(len(values) - 1) // 4]


def measure(
    comm: Communicator,
    collective: str,
    nbytes: int,
    effort: Effort,
    arrays: str = "plain",
    choices: Sequence[str] | None = None,
) -> Measured:
    """Times what may be chosen for a size, interleaved. Collective.

    Args:
        comm: The ranks that take part.
        collective: Its name.
        nbytes: Size of the message, bytes; f32 elements.
        effort: How long to measure.
        arrays: plain, or mapped: those of `Communicator.empty`.
        choices: ALGORITHM/PROTOCOL, or AUTO; None: all that may be chosen.

    Returns:
        The same on every rank.

    Raises:
        As the collective.

    Cost: about rounds * candidates * batch_s, and twice that for finding out the calls of a batch.
    """
    import numpy as np

    count = max(1, nbytes // 4)
    make = comm.empty if arrays == "mapped" else np.zeros
    x = make(count, np.float32)
    out = make(count, np.float32)

    def slowest(choices: list[str], num_calls: Mapping[str, int]) -> list[float]:
        own = [
            _core.time_calls(comm, collective, x, out, _argument(choice), num_calls[choice])
            for choice in choices
        ]
        all_ranks = np.array(own)
        comm.all_reduce(all_ranks, "max")
        return [float(t) for t in all_ranks]

    live = []
    for choice in choices or _core.choices(collective, x.nbytes):
        # Some algorithms do not exist for every number of ranks, or cannot do without slots: the
        # call raises on all ranks.
        with suppress(UsageError):
            _core.time_calls(comm, collective, x, out, _argument(choice), 1)
            live.append(choice)
    num_calls = {
        choice: calibrate(
            lambda k, choice=choice: k * slowest([choice], {choice: k})[0],  # type: ignore[misc]
            effort.batch_s,
        )[0]
        for choice in live
    }
    rounds_s: dict[str, list[float]] = {choice: [] for choice in live}
    spent_s = 0.0
    for round_idx in range(effort.rounds):
        if round_idx >= _FEW_ROUNDS and spent_s > effort.limit_s:
            break
        if round_idx in (_FEWER_ROUNDS, _FEW_ROUNDS):
            # By their best rounds: a disturbance must not end a candidate's chances.
            margin = _FAR if round_idx == _FEWER_ROUNDS else effort.margin
            least_s = {choice: min(rounds_s[choice]) for choice in live}
            most_s = margin * min(least_s.values())
            live = [choice for choice in live if least_s[choice] <= most_s or choice == AUTO]
        # The first candidate of a round finds the caches as the last one of the round before left
        # them, so each candidate is first in some rounds.
        turn = round_idx % len(live)
        order = live[turn:] + live[:turn]
        for choice, t in zip(order, slowest(order, num_calls), strict=True):
            rounds_s[choice].append(t)
            spent_s += t * (num_calls[choice] + 2)
    return Measured(collective, arrays, x.nbytes, rounds_s)


def _argument(choice: str) -> str:
    return "" if choice == AUTO else choice


def asks_for_arrays(collective: str, nbytes: int) -> bool:
    """Whether it may make a difference where the arrays of such a message lie."""
    return any(choice.endswith("/direct") for choice in _core.choices(collective, nbytes))


def smallest_nbytes(collective: str, n: int) -> int:
    """The smallest message of f32 with an element in each block, in bytes."""
    return 4 * next(r.blocks_per_payload(n) for r in _core.collectives() if r.name == collective)
