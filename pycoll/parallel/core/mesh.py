"""The mesh: ranks as a grid with named axes, and a communicator for each axis of the grid.

tp is the fastest axis, so its ranks, which communicate most, are closest; then come cp, ep and
dp; pp is the slowest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import pycoll
from pycoll import environment
from pycoll.communicator import Communicator
from pycoll.errors import UsageError
from pycoll.parallel.core.devices import CPU, agreed_device, clock_of
from pycoll.parallel.core.ledger import AxisGroup, Ledger
from pycoll.parallel.core.mesh_sizes import AXES, infer_sizes, parse_sizes
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.core.transfers import Transfers

if TYPE_CHECKING:
    import torch

    from pycoll.parallel.core.dealing import Dealing

_OF_ONE_HOST = ("local", "shm")  # transports
_world: list[Communicator] = []  # the default communicator, joined once


class Mesh:
    """A grid of ranks: stages (pp), replicas (dp), experts (ep), sequences (cp), tensors (tp).

    Attributes:
        world: The communicator of all ranks of the mesh, in grid order.
        coordinates: This rank's place along each axis, `{"pp": 0, "dp": 1, "ep": 0, ...}`.
        ledger: Counts what the trainers send along the axes.
        virtual_replicas: Number of parts of each batch; 0: one for each replica.
    """

    def __init__(
        self,
        world: Communicator,
        sizes: Mapping[str, int],
        device: str = CPU,
        virtual_replicas: int = 0,
    ) -> None:
        self._device, self.virtual_replicas = device, virtual_replicas
        self._whole: Mesh | None = None
        if virtual_replicas:
            world.deterministic = True  # so that tp, too, adds up in one order
        self._sizes = {axis: sizes[axis] for axis in AXES}
        self.world = _in_order_of_hosts(world)
        places = np.unravel_index(self.world.rank, tuple(self._sizes.values()))
        self.coordinates = {axis: int(place) for axis, place in zip(AXES, places, strict=True)}
        # Splits are collective, so all ranks make all communicators at once and in one order.
        self._comms: dict[tuple[str, ...], Communicator] = {}
        for axis in AXES:  # axes of size 1 share one communicator
            alone = () if self._sizes[axis] == 1 else (axis,)
            if alone not in self._comms:
                self._comms[alone] = self._split(*alone)
            self._comms[axis,] = self._comms[alone]
        self.ledger = Ledger(clock=clock_of(device))
        self._transfers: dict[tuple[str, ...], Transfers] = {}
        self._lines: dict[tuple[str, ...], AxisGroup] = {}
        self._broken: list[Communicator] = []

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        import torch

        return torch.device(self._device)

    def comm(self, *axes: str) -> Communicator:
        """The communicator of this rank's group along an axis, in the order of the axis.

        With several axes, it spans all of them; the first call for such a group is collective.
        """
        key = self._key(axes)
        if key not in self._comms:
            self._comms[key] = self._split(*key)
        return self._comms[key]

    def line(self, *axes: str) -> AxisGroup:
        """Like `comm`, as an AxisGroup that counts its collectives in `ledger`."""
        if axes not in self._lines:
            self._lines[axes] = AxisGroup(
                "+".join(axes), self.comm(*axes), self.ledger, self.transfers(*axes), self._device
            )
        return self._lines[axes]

    def transfers(self, *axes: str) -> Transfers:
        """Moves tensors between the ranks of `comm(*axes)`."""
        key = self._key(axes)
        if key not in self._transfers:
            self._transfers[key] = Transfers(self.comm(*axes))
        return self._transfers[key]

    def line_of_dp(self, *axes: str) -> AxisGroup:
        """Like `line`, along dp and those of `axes` that have several ranks."""
        return self.line(*self._of_dp(axes))

    def make_lines_of_dp(self, lines: Iterable[tuple[str, ...]]) -> None:
        """Makes the communicators of `line_of_dp(*axes)` for each `axes` of any rank. Collective.

        Args:
            lines: The axes of each line that this rank will use; other ranks may need others, such
                as stages whose layers differ.

        Cost: with pp, an all_gather; a split for each new line.
        """
        wanted = {self._key(self._of_dp(axes)) for axes in lines}
        if self.size("pp") > 1:  # otherwise all ranks have the same layers
            of_ranks = gather_objects(sorted(wanted), self.world)
            wanted = {tuple(key) for of_rank in of_ranks for key in of_rank}
        for key in sorted(wanted):
            self.comm(*key)

    def dealing(self) -> Dealing:
        """How batches are dealt to the replicas. Collective at its first call."""
        from pycoll.parallel.core.dealing import Dealing  # imports torch

        replicas = self.line_of_dp("ep")
        return Dealing(replicas.size, replicas.rank, self.virtual_replicas)

    def ranks_along(self, axis: str) -> list[int]:
        """The ranks of this rank's group along an axis, in the order of the axis."""
        grid = np.arange(self.world.size).reshape(tuple(self._sizes.values()))
        here = [slice(None) if name == axis else self.coordinates[name] for name in AXES]
        return grid[tuple(here)].tolist()

    def one_replica(self) -> Mesh:
        """The ranks that share this rank's replica, as a mesh with dp=1. Collective.

        It shares the ledger with this mesh.
        """
        others = self.comm(*(axis for axis in AXES if axis != "dp"))
        mesh = Mesh(others, {**self._sizes, "dp": 1}, self._device, self.virtual_replicas)
        mesh.ledger, mesh._whole = self.ledger, self
        return mesh

    @property
    def whole(self) -> Mesh:
        """The mesh that this one is a replica of (`one_replica`); else this mesh."""
        return self._whole or self

    @property
    def writes_files(self) -> bool:
        """Whether this rank's share of the model belongs into files: one replica of each is enough.

        Replicas that share a mesh share the files out; of those that have a mesh each, the first
        one writes.
        """
        return self._whole is None or self._whole.rank("dp") == 0

    def rank(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self.coordinates[self._known(axis)]

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self._sizes[self._known(axis)]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along each axis, slowest first."""
        return dict(self._sizes)

    @property
    def planes(self) -> list[tuple[str, ...]]:
        """The axes, and the combinations of axes, that have communicators of several ranks."""
        known = [axes for axes in self._comms if 0 < len(axes) < len(AXES)]
        return [axes for axes in known if self.comm(*axes).size > 1]

    @property
    def place(self) -> str:
        """This rank's place along the axes with several ranks, such as "pp 1, dp 0"."""
        several = [axis for axis in AXES if self._sizes[axis] > 1] or ["dp"]
        return ", ".join(f"{axis} {self.coordinates[axis]}" for axis in several)

    def go_on_with(self, left: Communicator, reason: str) -> None:
        """Lets the lines of replicas, and of all ranks, have only those that are left. Collective.

        For the rest of a step on a mesh of dp and pp. Groups of other axes stay broken.

        Args:
            left: The ranks that are left.
            reason: For the error of ranks that wait in a communicator of the axes.
        """
        self._break(reason)
        self.world = left
        for key, color in (("dp",), self.rank("pp")), (AXES, 0):
            if key in self._comms:
                self._broken.append(self._comms[key])
            comm = left.split(color)
            assert comm is not None
            self._comms[key] = comm
            for axes, line in self._lines.items():
                if self._key(axes) == key:
                    line.go_on_with(comm)

    def abort(self, reason: str) -> None:
        """Breaks the communicators of the axes, so that no rank waits in one, and closes them.

        Not collective. The world communicator is left as it is.

        Args:
            reason: For the error of the other ranks.
        """
        self._break(reason)
        self.close()

    def close(self) -> None:
        """Closes the communicators of the axes; the world communicator stays open."""
        for transfers in self._transfers.values():
            transfers.close()
        every = (*self._comms.values(), *self._broken)
        for comm in {id(comm): comm for comm in every}.values():
            comm.close()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self._sizes.items())
        return f"<Mesh {sizes}, rank {self.world.rank} of {self.world.size}>"

    def _break(self, reason: str) -> None:
        for comm in self._comms.values():
            if not comm.closed and comm.size > 1:
                comm.abort(reason)

    def _split(self, *axes: str) -> Communicator:
        others = [self.coordinates[name] if name not in axes else 0 for name in AXES]
        color = int(np.ravel_multi_index(others, tuple(self._sizes.values())))
        part = self.world.split(color, self.world.rank)
        assert part is not None
        return part

    def _of_dp(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return ("dp", *(axis for axis in axes if self.size(axis) > 1))

    def _key(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        known = [self._known(axis) for axis in axes]
        return tuple(axis for axis in AXES if axis in known)

    def _known(self, axis: str) -> str:
        if axis not in self._sizes:
            raise UsageError(f"mesh: there is no axis {axis!r}, expected one of {', '.join(AXES)}")
        return axis


def world() -> Communicator:
    """The communicator of all ranks of this job, created at first use."""
    if not _world or _world[0].closed:
        _world[:] = [pycoll.init()]
    return _world[0]


def replace_world(comm: Communicator) -> None:
    """Makes another communicator, such as one that has shrunk, that of all ranks of this job."""
    _world[:] = [comm]


def mesh(
    *,
    dp: int = -1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    tp: int = 1,
    comm: Communicator | None = None,
    device: Any = None,
    virtual_replicas: int = 0,
) -> Mesh:
    """Arranges the ranks of this job in a grid. Collective.

    The environment variable PYCOLL_MESH, such as "dp=2,tp=2,pp=2" (set by `pycoll run --mesh`),
    replaces the sizes. Without a launcher there is one rank, and the sizes are ignored.

    Args:
        dp: Number of replicas, which share a batch; -1: as many as the ranks allow.
        pp: Number of pipeline stages, or -1.
        ep: Number of ranks that share the experts of a mixture, or -1; they also share a batch.
        cp: Number of ranks that share each sequence, or -1.
        tp: Number of ranks that share each tensor, or -1.
        comm: The ranks; None: those of `pycoll.init()`.
        device: Where models, batches and messages are: a device of torch, or its name, such as
            "cuda". Without a number, the ranks of a host take its devices in turn. None: the CPU.
        virtual_replicas: Number of parts into which each batch is cut, such as the largest number
            of replicas that is ever wanted. Gradients of a part are computed by themselves, and
            added up in one order, so that the bits of the weights do not depend on `dp`. 0: each
            replica has one part. See docs/elastic.md for what that costs and what it excludes.

    Returns:
        The mesh.

    Raises:
        UsageError: The sizes do not multiply to the number of ranks, more than one is -1, a rank
            has no such device, the ranks have different kinds of devices, or `virtual_replicas`
            is negative.

    Cost: a split for each axis.
    """
    asked = {"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp}
    if text := environment.read("PYCOLL_MESH"):
        asked = dict.fromkeys(AXES, 1) | parse_sizes(text)
    if comm is None:
        comm = world()
        if comm.size == 1 and not text:
            asked = dict.fromkeys(AXES, 1)
    if virtual_replicas < 0:
        raise UsageError(f"mesh: virtual_replicas is {virtual_replicas}, expected 0 or more")
    sizes = infer_sizes(asked, comm.size)
    return Mesh(comm, sizes, agreed_device(device, comm), virtual_replicas)


def _in_order_of_hosts(world: Communicator) -> Communicator:
    """Orders ranks by host, whatever order the launcher assigned."""
    if world.transport in _OF_ONE_HOST:
        return world
    hosts = world.all_gather(np.array([world.host_number], np.int64)).reshape(-1)
    order = np.argsort(hosts, kind="stable")
    if (order == np.arange(world.size)).all():
        return world
    ordered = world.split(0, int(np.flatnonzero(order == world.rank)[0]))
    assert ordered is not None
    return ordered


__all__ = ["Mesh", "mesh", "replace_world", "world"]
