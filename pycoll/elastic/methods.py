"""What a communicator can do about ranks that are gone and ranks that come."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pycoll import _core

if TYPE_CHECKING:
    from pycoll.communicator import Communicator


class ElasticMethods(_core.Communicator):
    """Methods of `pycoll.Communicator` (docs/elastic.md)."""

    def shrink(self, timeout_s: float | None = None) -> Communicator:
        """Makes a communicator of the ranks that are left, after an error or before.

        Collective over those: each calls it when it learns of the failure. They agree on who is
        left, by majority, so that no two parts of a world that a broken network has cut go on: it
        takes more than half of the ranks whose processes are not known to have ended, or just half
        with the lowest of them. The others are refused. A rank that lives and does not call within
        `timeout_s` counts as one that may go on elsewhere.

        Args:
            timeout_s: Seconds until all that live must have called; by default the deadline of
                this communicator's operations.

        Returns:
            The new communicator, ranks in their old order; `former_ranks` are their old numbers.
            This one is closed, and so are arrays of its `empty`: allocate, register and split anew.

        Raises:
            UsageError: This communicator is one of threads, of `split` or `group`, or closed.
            PeerDiedError: This rank is in a minority, which must not go on.
            TimeoutError: Ranks that live did not come.

        Cost: A few milliseconds when processes have ended; PYCOLL_SILENCE_S (5 s) when a host does
        not answer.
        """
        from pycoll.elastic.resize import shrink

        return shrink(cast("Communicator", self), timeout_s)

    def grow(self, num_new: int, address: str, timeout_s: float = 60.0) -> Communicator:
        """Makes a communicator of these ranks and newcomers. Collective; alike on all ranks.

        A newcomer is a process that calls `pycoll.join(address)`, before or after this. The session
        must have a secret of its own where others can reach the port: PYCOLL_TOKEN, the same for
        newcomers.

        Args:
            num_new: How many newcomers are waited for.
            address: "host:port" of rank 0's host, where rank 0 waits for them.
            timeout_s: Seconds until they must have come.

        Returns:
            The new communicator: these ranks in their order, then the newcomers in the order in
            which they came. This one is closed.

        Raises:
            UsageError: `address` makes no sense, or `num_new` is below 1.
            TimeoutError: Too few newcomers came; this communicator works on.
            SystemError: Rank 0 cannot listen at `address`.

        Cost: That of `pycoll.init`.
        """
        from pycoll.elastic.resize import grow

        return grow(cast("Communicator", self), num_new, address, timeout_s)
