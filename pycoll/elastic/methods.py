"""Methods of communicators that remove failed ranks, add new ones, and agree after failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pycoll import _core

if TYPE_CHECKING:
    from pycoll.communicator import Communicator


class ElasticMethods(_core.Communicator):
    """Methods of `pycoll.Communicator` (docs/elastic.md)."""

    def shrink(self, timeout_s: float | None = None) -> Communicator:
        """Makes a communicator of the surviving ranks, after an error or before.

        Collective over the surviving ranks: each calls it when it detects the failure. They agree
        on the members by majority, so that a network partition never yields two worlds: a new world
        needs more than half of the ranks whose processes are not known to have ended, or exactly
        half including the lowest of them. Other ranks raise PeerDiedError. A live rank that does
        not call within `timeout_s` counts as one that may go on elsewhere.

        Args:
            timeout_s: Seconds in which all live ranks must call; by default the timeout of this
                communicator's operations.

        Returns:
            The new communicator, ranks in their old order; `former_ranks` are their old numbers.
            This one is closed, and so are arrays of its `empty`: allocate, register and split anew.

        Raises:
            UsageError: This communicator's ranks are threads, it was made by `split` or `group`, or
                it is closed.
            PeerDiedError: This rank is in a minority, which must not go on.
            TimeoutError: Live ranks did not call before the deadline.

        Cost: A few milliseconds when processes have ended; PYCOLL_SILENCE_S (5 s) when a host does
        not answer.
        """
        from pycoll.elastic.resize import shrink

        return shrink(cast("Communicator", self), timeout_s)

    def agree(self, value: int, op: str = "and", timeout_s: float | None = None) -> int:
        """Agrees on a number with the surviving ranks, after an error or before.

        Collective over the surviving ranks, which call it equally often. It returns the same on all
        of them, also if ranks die meanwhile: then the value of a dead rank is either in the result
        of all ranks or in none. The communicator may be broken, and stays as it is. For example,
        `if comm.agree(ok): ...` asks whether all ranks succeeded, and `comm.agree(step, "min")`
        which step all have finished. Majorities count as in `shrink`.

        Args:
            value: This rank's number, from -2**63 to 2**63 - 1, or a bool.
            op: How the values are combined: "and" (bitwise), "min" or "max". Identical on all
                ranks.
            timeout_s: Seconds in which all live ranks must call; by default the timeout of this
                communicator's operations.

        Returns:
            The combined value; a bool if all values are.

        Raises:
            UsageError: The value or the op is invalid, the ranks' ops differ, this communicator's
                ranks are threads, it was made by `split` or `group`, or it is closed or replaced.
            PeerDiedError: This rank is in a minority, as for `shrink`.
            TimeoutError: Live ranks did not call before the deadline. All ranks raise it.

        Cost: Two exchanges with the lowest live rank: a few milliseconds. PYCOLL_SILENCE_S (5 s)
        when a host does not answer.
        Source: MPI_Comm_agree of ULFM (Bland et al., 2013), whose only operation is "and".
        """
        from pycoll.elastic.value_agreement import agree

        return agree(cast("Communicator", self), value, op, timeout_s)

    def grow(self, num_new: int, address: str, timeout_s: float = 60.0) -> Communicator:
        """Makes a communicator of these ranks and newcomers.

        Collective; the arguments are identical on all ranks. A newcomer is a process that calls
        `pycoll.join(address)`, before or after this call. The session and the newcomers have the
        same PYCOLL_TOKEN. Without one, `address` is a loopback address, and newcomers belong to the
        same user on this host.

        Args:
            num_new: Number of newcomers to wait for.
            address: "host:port" of rank 0's host, where rank 0 waits for them.
            timeout_s: Seconds in which they must join.

        Returns:
            The new communicator: these ranks in their order, then the newcomers in order of
            arrival. This one is closed.

        Raises:
            UsageError: `address` is invalid, or `num_new` is below 1.
            TimeoutError: Too few newcomers joined; this communicator stays usable.
            PeerDiedError: A rank or a newcomer ended meanwhile.
            SystemError: Rank 0 cannot listen at `address`.

        Cost: as `pycoll.init`.
        """
        from pycoll.elastic.resize import grow

        return grow(cast("Communicator", self), num_new, address, timeout_s)
