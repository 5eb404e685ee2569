"""Tensors from one rank to another: tagged messages on the CPU, links of two ranks on a device.

The host waits in messages of a device's arrays (decision 0067). A link is a communicator of the
sender and the receiver, and a message is a broadcast in it: kernels move it on the device's streams
(decision 0058).

Invariant: both ends of a link name the same tensors in the same order; links do not wait for each
other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pycoll.parallel.core.devices import CPU

if TYPE_CHECKING:
    from torch import Tensor

    from pycoll.communicator import Communicator
    from pycoll.work import Work


class Link(NamedTuple):
    """A way from one rank to another; several ways between two ranks have different lanes."""

    source: int
    target: int
    lane: str


class Transfers:
    """Sends and receives between the ranks of a communicator.

    Attributes:
        comm: The communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._pairs: dict[Link, Communicator | None] = {}
        self._groups: dict[tuple[int, ...], Communicator | None] = {}

    def connect(self, links: Iterable[Link], device: str) -> None:
        """Makes the links that tensors on `device` need and that do not exist.

        Collective: all ranks name the same links in the same order.

        Cost: a split for each new link, and its memory on the device.
        """
        if device == CPU:
            return
        for link in links:
            if link not in self._pairs:
                pair = self._pairs[link] = self.comm.group([link.source, link.target])
                if pair is not None:
                    # The first operation waits on the host for the other end. Later ones do not, so
                    # their order among links is free.
                    pair.empty(1, "u8", device)

    def send(self, link: Link, x: Tensor, tag: int = 0) -> Work:
        """Starts to send a contiguous tensor along a link that begins here.

        Args:
            link: The link.
            x: The tensor; it stays unchanged until the work is done.
            tag: Tells messages on the CPU apart; those on a device come in order.
        """
        if x.device.type == CPU:
            sent: Work = self.comm.send(x, link.target, tag, async_op=True)
            return sent
        return self._broadcast(link, x)

    def receive(self, link: Link, x: Tensor, tag: int = 0) -> Work:
        """Starts to receive into a contiguous tensor along a link that ends here."""
        if x.device.type == CPU:
            coming: Work = self.comm.recv(x, link.source, tag, async_op=True)
            return coming
        return self._broadcast(link, x)

    def group(self, ranks: Iterable[int]) -> Communicator | None:
        """The communicator of some ranks; None on the others. Its first use is collective."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self.comm.group(key)
        return self._groups[key]

    def close(self) -> None:
        """Closes the links."""
        for comm in (*self._pairs.values(), *self._groups.values()):
            if comm is not None:
                comm.close()
        self._pairs.clear()
        self._groups.clear()

    def _broadcast(self, link: Link, x: Tensor) -> Work:
        pair = self._pairs[link]
        assert pair is not None
        moved: Work = pair.broadcast(x, 0, async_op=True)
        return moved


@dataclass(slots=True)
class Receive:
    """A receive that runs within `wait`.

    Attributes:
        comm: The communicator.
        x: The tensor that is received into.
        source: The rank that sends; None: any rank, and after `wait` the one that sent.
    """

    comm: Communicator
    x: Tensor
    source: int | None

    def wait(self) -> None:
        """Receives."""
        if self.source is None:
            self.source = self.comm.recv_any(self.x)
        else:
            self.comm.recv(self.x, self.source)


def receive(comm: Communicator, x: Tensor, source: int | None) -> Work | Receive:
    """Starts to receive a message; between devices of several hosts, `wait` does it all.

    Args:
        comm: The communicator.
        x: Contiguous memory for it.
        source: The rank that sends; None: any rank.
    """
    if x.device.type != CPU and not comm._carries_devices:
        return Receive(comm, x, source)
    coming: Work = comm.recv(x, source, async_op=True)
    return coming


def ring_links(size: int) -> list[Link]:
    """From each rank to the next one, around."""
    return [Link(rank, (rank + 1) % size, "ring") for rank in range(size)]


__all__ = ["Link", "Receive", "Transfers", "receive", "ring_links"]
