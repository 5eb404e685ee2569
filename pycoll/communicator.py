"""Communicators: the ranks that take part, and the collectives that they run.

The collectives come from the C++ class as they are (csrc/bindings/bind_collectives.cc): at four
bytes a Python function around them would cost a quarter of the call. `help(Communicator)` shows
them.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from pycoll import _core
from pycoll.arrays.device import device_array_over, device_number
from pycoll.arrays.memory import array_over, item_size
from pycoll.coalesce import Coalesced
from pycoll.elastic.methods import ElasticMethods
from pycoll.elastic.owner_port import OwnerPort, open_owner_port
from pycoll.errors import UsageError
from pycoll.observe import flight, stacks
from pycoll.rendezvous import mpi as meeting
from pycoll.work import Work

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Communicator(ElasticMethods):
    """The ranks that take part in collectives. Made by `init`, `split` and `run_ranks`.

    A communicator is used by one thread at a time. After an error it is broken: every further call
    raises, and a new one can be made. It is also a context manager that closes it.

    Its attribute `register_after` says how often a NumPy array (of 16 KiB or more, for a message of
    64 KiB or more) must be passed to collectives before it is registered by itself
    (docs/decisions/0023): 8, or what the environment variable PYCOLL_REGISTER_AFTER says; 0 is
    never. The communicators that `split` and `group` make take it over. Ranks may differ in it.

    Its attribute `deterministic` is what the collectives' argument of that name is by default; the
    communicators that `split` and `group` make take it over. Alike on all ranks.

    Its attribute `former_ranks` says, of one that `shrink`, `grow` or `join` made, which rank each
    of its ranks was in the communicator before it: -1 for a newcomer. Else it is empty.
    """

    def __init__(self, core: _core.Communicator) -> None:
        super().__init__(core)
        _open.add(self)
        self.former_ranks: list[int] = []
        self._owner_ports: list[OwnerPort] = []
        self._leave_homes = weakref.finalize(self, _close_owner_ports, self._owner_ports)
        if (writer := stacks.install()) is not None:
            self._set_stack_writer(writer.signum, writer.fd)
        flight.watch(self)

    def coalesce(self) -> Coalesced:
        """Launches several operations as one: `with comm.coalesce(): ...`.

        Within the context, collectives, sends and receives are noted, and return the arrays in
        which their results will be; at its end all are run. Messages are all posted before anything
        is waited for, so that no order of sends and receives deadlocks. Small all_reduces that
        follow each other are packed into one where no bit of a result depends on it. An error
        within the context drops the group: nothing was sent. A context within another one adds to
        it. All ranks must group their collectives alike.

        Returns:
            The context manager.

        Raises:
            UsageError: `async_op` or `recv_any` within it.
            Error: At its end, what ended an operation of the group.

        Cost: one launch, and one message for each pack of small all_reduces.
        """
        return Coalesced(self)

    def split(self, color: int, key: int = 0) -> Communicator | None:
        """Makes a communicator of the ranks with the same color. Collective.

        Args:
            color: Which part this rank goes to; negative: none.
            key: Orders the ranks within a part; ties by rank.

        Returns:
            The part's communicator, None for a negative color.

        Raises:
            As `all_reduce`; TimeoutError when a member does not come.

        Cost: one small all-reduce and one exchange of memory handles.
        """
        core = self._split(color, key)
        return None if core is None else Communicator(core)

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Makes a communicator of some of the ranks. Collective over all ranks of this one.

        Args:
            ranks: The members, alike on all ranks; their order here is that of their new ranks.

        Returns:
            The members' communicator, None on a rank that is not among them.

        Raises:
            UsageError: `ranks` is empty, names a rank twice or one that is not there, or differs
                between the ranks.
            Others: As `split`.

        Cost: as `split`.
        """
        members = list(ranks)
        strangers = [rank for rank in members if rank not in range(self.size)]
        if strangers or not members or len(set(members)) < len(members):
            raise UsageError(
                f"group: ranks are {members}, expected at least one rank of 0..{self.size - 1}, "
                "none of them twice"
            )
        # Ranks that were given different lists must not meet.
        color = zlib.crc32(repr([int(rank) for rank in members]).encode()) >> 1
        if self.rank not in members:
            return self.split(-1)
        part = self.split(color, members.index(self.rank))
        assert part is not None
        if part.size != len(members):
            part.close()
            raise UsageError(
                f"group: ranks are {members} on rank {self.rank}, and not on all of them: "
                f"{part.size} of {len(members)} came"
            )
        return part

    def empty(self, shape: int | Sequence[int], dtype: Any, device: Any = None) -> Any:
        """Makes an array in memory that the other ranks reach directly: zeros, at first.

        A collective whose arrays all come from here, on all ranks, moves the bytes once, from
        where they are to where they go. Other arrays work too, through one copy more. Not
        collective: each rank makes its own. But on a device it is: all ranks make theirs together,
        and pass them, or parts at the same place in them, to a collective together.

        Args:
            shape: Of the array.
            dtype: A NumPy dtype, a torch dtype, or a name such as "f32" or "bf16".
            device: Such as "cuda:0" or its number. None: the host.

        Returns:
            A NumPy array, or a torch tensor for a torch dtype; on a device a DeviceArray, or a
            torch tensor. It may outlive the communicator; its memory is freed with it. A process
            forked later shares it instead of getting a copy.

        Raises:
            UsageError: No such dtype, or a negative size.
            SystemError: The system has no memory left.

        Cost: the system clears its pages once.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise UsageError(f"shape is {shape}, expected sizes of 0 or more")
        if device is not None:
            nbytes = math.prod(sizes) * item_size(dtype)
            return device_array_over(
                self._allocate_on_device(device_number(device), nbytes), sizes, dtype
            )
        return array_over(self._allocate(math.prod(sizes) * item_size(dtype)), sizes, dtype)

    def register(self, x: Any) -> Any:
        """Lets the other ranks reach `x` directly, as if it came from `empty`.

        The array stays where it is, under the same addresses; its pages move into memory that the
        ranks share. Views of it count as registered, too. Not collective; but only when all ranks'
        arrays are registered or from `empty`, bytes move without a copy more. Nothing happens
        where there is nothing to gain: an array of `empty`, or ranks that are threads.
        Of an array of a device it is collective, as `empty` is there, and so is `unregister`.

        Args:
            x: Contiguous, writable array of any shape and dtype. It is kept alive until
                `unregister`, or until this communicator closes. No other thread may write it
                during this call. A process forked later shares it instead of getting a copy.

        Returns:
            `x`.

        Raises:
            UsageError: `x` is no such array, lies in a mapped file or in memory that is shared
                already, or overlaps a registered array in part.
            SystemError: The system has no memory left.

        Cost: one copy of `x`. Each collective copies the two pages that `x` shares with others.
        """
        self._register(x)
        return x

    def unregister(self, x: Any) -> None:
        """Takes back one `register`, after the operations that are queued; copies `x` once.

        Args:
            x: An array that starts where a registered one does.

        Raises:
            UsageError: It is not registered here. Not raised where `register` does nothing.
        """
        if not self._unregister(x):
            raise UsageError("x is not registered with this communicator")

    def synchronize(self) -> None:
        """Waits until all operations on arrays of a device are over.

        A call on such arrays returns when it is launched; what goes wrong later, on any rank, is
        raised by the next call, by `Work.wait`, or here.

        Raises:
            Error: What ended an operation: as `all_reduce`.
            CudaError: The device refused something.
        """
        self._synchronize()

    def explain(
        self,
        collective: str,
        nbytes: int,
        dtype: Any = None,
        *,
        root: int = 0,
        mapped: bool = False,
        on_device: bool = False,
    ) -> str:
        """Says which algorithm, protocol and transport a call gets, and why.

        Args:
            collective: Its name, such as "all_reduce".
            nbytes: Size of the message, bytes.
            dtype: Of its elements. Today no choice depends on it.
            root: Of a rooted collective.
            mapped, on_device: Of arrays that `empty` or `register` gave; of this rank's device.

        Returns:
            The choice, who made it, and what is known of all candidates: docs/selection.md.

        Raises:
            UsageError: Unknown collective; or nothing has run on this rank's device yet.
        """
        return self._explain(collective, nbytes, root, mapped, on_device)

    def flight_record(self, *, all_ranks: bool = False) -> list[dict[str, Any]]:
        """What this rank, or every rank, did last: at most 1,024 operations of each.

        Args:
            all_ranks: Of all ranks of this communicator instead of this one.

        Returns:
            Dicts, the oldest first, rank after rank: `rank`, `sequence`, `collective`, `dtype`,
            `op`, `root`, `count` (elements of a block), `shape`, `nbytes`, `asked` and `algorithm`
            (asked for, and chosen), `deterministic`, `site` (the caller's file and line),
            `entered_ns` and `finished_ns` (of CLOCK_MONOTONIC; None while it runs), `failed`, and
            `digest`, which is equal where the ranks' calls agree.

        Cost: about a microsecond per record; other ranks are not disturbed.
        """
        ranks = range(self.size) if all_ranks else [self.rank]
        return [record for rank in ranks for record in self._records(rank)]

    def message_record(self, *, all_ranks: bool = False) -> list[dict[str, Any]]:
        """What this rank, or every rank, sent and received last: at most 1,024 messages of each.

        Args:
            all_ranks: Of all ranks of this communicator instead of this one.

        Returns:
            Dicts, the oldest first, rank after rank: `rank`, `number` (among the rank's messages),
            `kind` ("send" or "recv"), `peer` (None: any source), `source` (of a receive: who sends,
            or None yet), `tag`, `dtype`, `count`, `nbytes`, `blocking`, `site` (the caller's
            file and line), `entered_ns` and `finished_ns` (of CLOCK_MONOTONIC; None while it goes
            on; of a short message that ends as it begins they are equal), and `failed`.

        Cost: about a microsecond per record; other ranks are not disturbed.
        """
        ranks = range(self.size) if all_ranks else [self.rank]
        return [message for rank in ranks for message in self._messages(rank)]

    def stragglers(self) -> list[dict[str, Any]]:
        """Who comes last: how far apart the ranks entered the operations that are on record.

        Returns:
            A dict for each collective: `collective`, `operations`, `median_skew_us` and
            `max_skew_us` (last entry minus first), and `last`, how often each rank was last.

        Cost: as `flight_record` of all ranks.
        """
        return flight.stragglers(flight.CommunicatorSource(self))

    def close(self) -> None:
        """Leaves the world: whoever still waits for this rank gets an error that says so."""
        super().close()
        self._leave_homes()

    def _add_algorithm(self, collective: str, name: str, root: int) -> None:
        """The core met a name that it does not know: one registered in Python, or nobody's."""
        from pycoll import schedule

        self._add_schedule(schedule.build(collective, name, n=self.size, root=root).core)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.transport
        return f"<pycoll.Communicator rank {self.rank} of {self.size}, {state}>"


def init(timeout_s: float = 60.0, deterministic: bool = False, *, mpi: Any = None) -> Communicator:
    """Joins the ranks of this job.

    Who takes part is read from the environment: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    (`pycoll run`, torchrun), or mpiexec's or SLURM's variables. With none there is one rank. Ranks
    that mpiexec has put on several hosts find each other through MPI.

    Args:
        timeout_s: Deadline of joining and of every later operation, seconds.
        deterministic: Reduce in such a way that the bits of a result depend on the values and
            their order of ranks alone: not on algorithm, message size, chunking or placement.
            A call can say otherwise. Alike on all ranks.
        mpi: An mpi4py communicator: its ranks take part, in its order, whatever the environment
            says.

    Returns:
        The communicator of all ranks.

    Raises:
        UsageError: The environment makes no sense, or `mpi` is no communicator.
        MpiError: MPI is needed, and there is none that this build can use.
        TimeoutError: Some rank did not come; the message names it.
    """
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s!r}, expected a number of seconds above 0")
    if mpi is None:
        core, session = _core.init_from_environment(float(timeout_s))
    else:
        core, session = meeting.init_over(mpi, float(timeout_s))
    comm = Communicator(core)
    comm.deterministic = bool(deterministic)
    if comm.size > 1:
        who = (comm.rank, comm.size, comm.transport == "shm")
        comm._owner_ports.append(
            open_owner_port(session.exchange, *who, session.name, session.token, timeout_s)
        )
        session.close()
    return comm


def _close_owner_ports(ports: list[OwnerPort]) -> None:
    for port in ports:
        port.socket.close()
    ports.clear()


@atexit.register
def _close_all() -> None:
    left_open = [comm for comm in _open if not comm.closed]
    for comm in left_open:
        comm.close()
    if left_open and threading.active_count() > 1:
        # Threads that this has freed come back from the core now: later, while the interpreter
        # ends, they would abort it.
        time.sleep(0.05)
    meeting.finish()


def _disown_all() -> None:
    """In a forked process: the communicators are the parent's, whose ranks live on."""
    for comm in list(_open):
        comm._disown()


os.register_at_fork(after_in_child=_disown_all)


__all__ = ["Communicator", "Work", "init"]
