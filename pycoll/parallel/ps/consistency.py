"""When a worker may pull, and when a step is complete: one class for each mode."""

from __future__ import annotations

from dataclasses import dataclass

from pycoll.errors import UsageError


@dataclass(frozen=True, slots=True)
class Consistency:
    """What a mode demands.

    Attributes:
        gathers: An update is the mean of several workers' gradients of one step, and a pull waits
            for the update of the step before; else each push is an update.
        needs_clocks: Servers must hear of each worker's clock at once.
    """

    gathers = False
    needs_clocks = False

    def may_pull(self, clock: int, slowest: int) -> bool:
        """Whether a worker at a clock may pull, for the clock of the slowest worker.

        A clock is the number of steps that a worker has ended.
        """
        return True

    def is_complete(self, pushed: set[int], behind: set[int]) -> bool:
        """Whether a step has all the gradients that it waits for.

        Args:
            pushed: Workers with a gradient of the step; at least one.
            behind: Living workers that have not ended the step.
        """
        return True


@dataclass(frozen=True, slots=True)
class Async(Consistency):
    """No worker waits: each push is an update, of a gradient of older weights."""


@dataclass(frozen=True, slots=True)
class Bounded(Consistency):
    """Stale synchronous parallel: no worker is more than `staleness` clocks ahead of the slowest.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
        Parameter Server", NeurIPS.
    """

    staleness: int
    needs_clocks = True

    def may_pull(self, clock: int, slowest: int) -> bool:
        """See Consistency."""
        return clock - slowest <= self.staleness


@dataclass(frozen=True, slots=True)
class Sync(Consistency):
    """Bulk synchronous: a step is the mean of the first k gradients, by default those of all.

    Late gradients are dropped, and their workers go on with the step that is current then.

    Source: Chen et al. 2016, "Revisiting Distributed Synchronous SGD", arXiv:1604.00981 (backup
        workers).
    """

    k: int | None = None
    gathers = True

    def is_complete(self, pushed: set[int], behind: set[int]) -> bool:
        """See Consistency."""
        return (self.k is not None and len(pushed) >= self.k) or not behind - pushed


MODES = ("sync", "async", "ssp", "ksync")


def consistency_of(
    mode: str,
    num_workers: int,
    *,
    staleness: int | None = None,
    k: int | None = None,
    backup: int = 0,
) -> Consistency:
    """What the options of the user mean.

    Raises:
        UsageError: An option is out of its range, or the mode has no such option.
    """
    if mode not in MODES:
        raise UsageError(f"parameter server: mode={mode!r}, expected one of {', '.join(MODES)}")
    if (staleness is not None) != (mode == "ssp"):
        what = "has no staleness=" if mode != "ssp" else "needs staleness=, in clocks"
        raise UsageError(f"parameter server: mode={mode!r} {what}")
    if staleness is not None and staleness < 0:
        raise UsageError(f"parameter server: staleness={staleness}, expected 0 or more clocks")
    if (k is not None) != (mode == "ksync"):
        what = "has no k=" if mode != "ksync" else "needs k=, a number of workers"
        raise UsageError(f"parameter server: mode={mode!r} {what}")
    if k is not None and not 1 <= k <= num_workers:
        raise UsageError(
            f"parameter server: k={k}, and there are {num_workers} workers: expected 1 to "
            f"{num_workers}"
        )
    if backup and (mode != "sync" or not 0 < backup < num_workers):
        raise UsageError(
            f"parameter server: backup={backup} with mode={mode!r} and {num_workers} workers: "
            "expected mode='sync' and fewer backup workers than workers"
        )
    if mode == "ssp":
        assert staleness is not None
        return Bounded(staleness)
    if mode == "async":
        return Async()
    return Sync(num_workers - backup if backup else k)


@dataclass(frozen=True, slots=True)
class Damping:
    """What a server does to a stale gradient.

    Attributes:
        scales: The learning rate is divided by 1 + staleness.
        cap: Gradients of a larger staleness are dropped; None: none is.

    Source: Zhang et al. 2016, "Staleness-aware Async-SGD", arXiv:1511.05950 (learning rate).
    """

    scales: bool = False
    cap: int | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap < 0:
            raise UsageError(f"parameter server: max_staleness={self.cap}, expected 0 or more")

    def factor(self, staleness: int) -> float | None:
        """The factor of the learning rate; None: the gradient is dropped."""
        if self.cap is not None and staleness > self.cap:
            return None
        return 1 / (1 + staleness) if self.scales else 1.0


__all__ = ["MODES", "Async", "Bounded", "Consistency", "Damping", "Sync", "consistency_of"]
