"""Communicators: the ranks that take part, and the collectives that they run.

The collectives are methods of the C++ class (csrc/bindings/bind_collectives.cc): for four bytes, a
Python wrapper would cost a quarter of the call. `help(Communicator)` lists them.
"""

from __future__ import annotations

import atexit
import operator
import os
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from pycoll import _core
from pycoll.arguments import flag, seconds, short_name, shown, text, whole_number
from pycoll.arrays.device import device_array_over, device_number
from pycoll.arrays.memory import array_over, sizes_and_bytes
from pycoll.coalesce import Coalesced
from pycoll.elastic.methods import ElasticMethods
from pycoll.elastic.owner_port import OwnerPort, open_owner_port
from pycoll.errors import UsageError
from pycoll.observe import flight, stacks
from pycoll.rendezvous import mpi as meeting
from pycoll.work import Work

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_INT32 = (-(1 << 31), (1 << 31) - 1)


class Communicator(ElasticMethods):
    """The ranks that take part in collectives. Made by `init`, `split` and `run_ranks`.

    A communicator is used by one thread at a time; beside it, other threads may start messages with
    `async_op=True` and wait for them. After an error it is broken: every further call raises, and a
    new communicator can be made. As a context manager it closes itself at the end.

    The attribute `register_after` is the number of times that a NumPy array (of 16 KiB or more, for
    a message of 64 KiB or more) is passed to collectives before it is registered automatically
    (docs/decisions/0023). The default is PYCOLL_REGISTER_AFTER, else 8; 0 means never. `split` and
    `group` copy it to new communicators. It may differ between ranks.

    The attribute `deterministic` is the default of the collectives' argument `deterministic`.
    `split` and `group` copy it to new communicators. It must be identical on all ranks.

    The attribute `timeout_s` is the deadline of each operation, in seconds. A change holds for
    operations of this rank that begin later.

    The attribute `former_ranks` lists, for a communicator made by `shrink`, `grow` or `join`, the
    rank of each member in the previous communicator: -1 for a newcomer. Otherwise it is empty.
    """

    def __init__(self, core: _core.Communicator) -> None:
        super().__init__(core)
        _open.add(self)
        self.former_ranks: list[int] = []
        self._owner_ports: list[OwnerPort] = []
        self._close_ports = weakref.finalize(self, _close_owner_ports, self._owner_ports)
        if (writer := stacks.install()) is not None:
            self._set_stack_writer(writer.signum, writer.fd)
        flight.watch(self)

    def coalesce(self) -> Coalesced:
        """Launches several operations as one: `with comm.coalesce(): ...`.

        Within the context, collectives, sends and receives are recorded, and return the arrays that
        will hold their results; they all run at its end. All messages are posted before the first
        wait, so that no order of sends and receives deadlocks. Consecutive small all_reduces are
        packed into one where this changes no bit of a result. An error within the context drops the
        group: nothing has been sent. A nested context adds to the outer one. The groups of
        collectives must be identical on all ranks.

        Returns:
            The context manager.

        Raises:
            UsageError: `async_op` or `recv_any` within it.
            Error: An operation of the group failed; raised at the end of the context.

        Cost: one launch, and one message for each pack of small all_reduces.
        """
        return Coalesced(self)

    def split(self, color: int, key: int = 0) -> Communicator | None:
        """Makes a communicator of the ranks with the same color. Collective.

        Args:
            color: Number of this rank's part; negative: no part.
            key: Order of the ranks within a part; equal keys keep the order of ranks.

        Returns:
            The part's communicator, None for a negative color.

        Raises:
            UsageError: `color` or `key` is no 32-bit integer.
            TimeoutError: A member did not make the call before the deadline.
            Others: As `all_reduce`.

        Cost: one small all-reduce and one exchange of memory handles.
        """
        color = whole_number(color, "color", _INT32[0], _INT32[1])
        core = self._split(color, whole_number(key, "key", _INT32[0], _INT32[1]))
        return None if core is None else Communicator(core)

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Makes a communicator of some of the ranks. Collective over all ranks of this one.

        Args:
            ranks: The members, identical on all ranks; their order is that of the new ranks.

        Returns:
            The members' communicator, None on a rank that is not among them.

        Raises:
            UsageError: `ranks` is empty, contains a rank twice or an invalid rank, or differs
                between the ranks.
            Others: As `split`.

        Cost: as `split`.
        """
        try:
            members = [operator.index(rank) for rank in ranks]
        except TypeError:
            members = []
        unknown = [rank for rank in members if rank not in range(self.size)]
        if unknown or not members or len(set(members)) < len(members):
            raise UsageError(
                f"group: ranks are {shown(ranks)}, expected at least one rank of "
                f"0..{self.size - 1}, each at most once"
            )
        # Ranks with different lists must get different colors.
        color = zlib.crc32(repr(members).encode()) >> 1
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
        """Makes an array of zeros in memory that the other ranks access directly.

        A collective whose arrays are all made by `empty`, on all ranks, moves the bytes once, from
        source to destination. Other arrays need one more copy. On the host, `empty` is not
        collective: each rank makes its own arrays. On a device it is collective: all ranks make the
        array together, and pass it, or the same part of it, to a collective together.

        Args:
            shape: Shape of the array.
            dtype: A NumPy dtype, a torch dtype, or a name such as "f32" or "bf16".
            device: A device such as "cuda:0", or its number. None: the host.

        Returns:
            A NumPy array, or a torch tensor for a torch dtype; on a device a DeviceArray, or a
            torch tensor. It may outlive the communicator; its memory is freed with it. A process
            forked later shares it instead of getting a copy.

        Raises:
            UsageError: The dtype is unknown or has Python objects, or the shape is invalid.
            SystemError: The system has no memory left.

        Cost: the system clears its pages once.
        """
        sizes, nbytes = sizes_and_bytes(shape, dtype)
        if device is not None:
            return device_array_over(
                self._allocate_on_device(device_number(device), nbytes), sizes, dtype
            )
        return array_over(self._allocate(nbytes), sizes, dtype)

    def register(self, x: Any) -> Any:
        """Lets the other ranks access `x` directly, like an array made by `empty`.

        The array keeps its addresses; its pages move into memory that the ranks share. Views of it
        count as registered, too. The call is not collective, but the extra copy is avoided only
        when all ranks' arrays are registered or made by `empty`. It does nothing where there is
        nothing to gain: for an array made by `empty`, or ranks that are threads.
        For a device array, `register` and `unregister` are collective. If the other ranks cannot
        access its memory, as that of torch's expandable segments, it is not registered, and a
        RuntimeWarning says why.

        Args:
            x: Contiguous, writable array of any shape and dtype. It is kept alive until
                `unregister`, or until this communicator closes. No other thread may write it
                during this call. A process forked later shares it instead of getting a copy.

        Returns:
            `x`.

        Raises:
            UsageError: `x` is not such an array, is in a mapped file or in memory that is already
                shared, or overlaps a registered array in part.
            SystemError: The system has no memory left.

        Cost: one copy of `x`. Each collective copies the two pages that `x` shares with other data.
        """
        if why := self._register(x):
            text = f"register: operations on the array go through slots, without an error: {why}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return x

    def unregister(self, x: Any) -> None:
        """Undoes one `register`, after the queued operations have ended; copies `x` once.

        Args:
            x: An array that starts at the address of a registered array.

        Raises:
            UsageError: `x` is not registered. Not raised where `register` does nothing.
        """
        if not self._unregister(x):
            raise UsageError("x is not registered with this communicator")

    def synchronize(self) -> None:
        """Waits until all operations on device arrays have ended.

        A call on device arrays returns after the launch. A later error on any rank is raised by the
        next call, by `Work.wait` or by `synchronize`.

        Raises:
            Error: An operation failed: as `all_reduce`.
            CudaError: A CUDA call failed.
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
        """Explains which algorithm, protocol and transport a call uses, and why.

        Args:
            collective: Its name, such as "all_reduce".
            nbytes: Size of the payload, in bytes.
            dtype: Type of the elements. At present no choice depends on it.
            root: Root of a rooted collective.
            mapped: Whether the arrays are registered or made by `empty`.
            on_device: Whether the arrays are on this rank's device.

        Returns:
            The choice, its reason, the expected times of all candidates, and for ranks that are
            pinned to CPUs the domain (L3, NUMA node, socket) in which the messages of each round
            stay: docs/selection.md.

        Raises:
            UsageError: The collective is unknown, or nothing has run on this rank's device yet.
        """
        collective = short_name(collective, "collective")
        nbytes = whole_number(nbytes, "nbytes", 0, (1 << 63) - 1)
        root = whole_number(root, "root", 0, self.size - 1)
        mapped, on_device = flag(mapped, "mapped"), flag(on_device, "on_device")
        choice = self._explain(collective, nbytes, root, mapped, on_device)
        if on_device:
            return choice
        from pycoll.topology.crossing import explain_domains

        return choice + explain_domains(self, collective, root, choice)

    def flight_record(self, *, all_ranks: bool = False) -> list[dict[str, Any]]:
        """Returns the last operations of this rank, or of every rank: at most 1,024 of each.

        Args:
            all_ranks: Include all ranks of this communicator, not only this one.

        Returns:
            Dicts, the oldest first, rank after rank: `rank`, `sequence`, `collective`, `dtype`,
            `op`, `root`, `count` (elements of a block), `shape`, `nbytes`, `asked` (the requested
            algorithm) and `algorithm` (the chosen one), `deterministic`, `site` (the caller's file
            and line), `entered_ns` and `finished_ns` (CLOCK_MONOTONIC; None while running),
            `failed`, and `digest`, which is equal where the ranks' calls agree.

        Cost: about a microsecond per record; other ranks are not disturbed.
        """
        ranks = range(self.size) if flag(all_ranks, "all_ranks") else [self.rank]
        return [record for rank in ranks for record in self._records(rank)]

    def message_record(self, *, all_ranks: bool = False) -> list[dict[str, Any]]:
        """Returns the last messages of this rank, or of every rank: at most 1,024 of each.

        Args:
            all_ranks: Include all ranks of this communicator, not only this one.

        Returns:
            Dicts, the oldest first, rank after rank: `rank`, `number` (among the rank's messages),
            `kind` ("send" or "recv"), `peer` (None: any source), `source` (for a receive: the
            sender, None until it is known), `tag`, `dtype`, `count`, `nbytes`, `blocking`, `site`
            (the caller's file and line), `entered_ns` and `finished_ns` (CLOCK_MONOTONIC; None
            while pending; equal for a short message that ends immediately), and `failed`.

        Cost: about a microsecond per record; other ranks are not disturbed.
        """
        ranks = range(self.size) if flag(all_ranks, "all_ranks") else [self.rank]
        return [message for rank in ranks for message in self._messages(rank)]

    def stragglers(self) -> list[dict[str, Any]]:
        """Reports which ranks enter last, and the skew of arrivals, for the recorded operations.

        Returns:
            A dict for each collective: `collective`, `operations`, `median_skew_us` and
            `max_skew_us` (last entry minus first), and `last`, how often each rank was last.

        Cost: as `flight_record` for all ranks.
        """
        return flight.stragglers(flight.CommunicatorSource(self))

    def abort(self, reason: str = "") -> None:
        """Breaks this communicator on all its ranks, at once and for good. Not collective.

        Every rank that waits in a call raises AbortedError with the reason, and so does every later
        call of any rank, also of this one. Use it when a rank cannot go on and the others must not
        wait for their deadline; `shrink` then makes a new world. Any thread may call it.

        Args:
            reason: For the error of the other ranks; they see its last 119 bytes.

        Raises:
            UsageError: The communicator is closed, or `reason` is no text.
        """
        self._abort(text(reason, "reason"))

    def close(self) -> None:
        """Leaves the world: a rank that still waits for this rank raises PeerDiedError."""
        super().close()
        self._close_ports()

    def _add_algorithm(self, collective: str, name: str, root: int) -> None:
        """Adds an algorithm that is registered in Python; called by the core for unknown names."""
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

    Reads the rank and the number of ranks from the environment: RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT (`pycoll run`, torchrun), or the variables of mpiexec or SLURM. Without any of them
    there is one rank. Ranks that mpiexec starts on several hosts find each other through MPI.

    Args:
        timeout_s: Deadline of joining and of every later operation, seconds.
        deterministic: Reduce so that the bits of a result depend on the values and the order of
            the ranks alone, not on algorithm, message size, chunking or placement. A call can
            override it. Identical on all ranks.
        mpi: An mpi4py communicator: its ranks take part, in its order; the environment is ignored.

    Returns:
        The communicator of all ranks.

    Raises:
        UsageError: The environment variables are invalid, there are more than 256 ranks, ranks of
            several hosts have no PYCOLL_TOKEN, or `mpi` is not a communicator.
        MpiError: MPI is needed, and this build cannot use any installed MPI library.
        TimeoutError: A rank did not join before the deadline; the message names it.
        PeerDiedError: A rank ended while the others waited for it.
    """
    timeout_s = seconds(timeout_s)
    deterministic = flag(deterministic, "deterministic")
    if mpi is None:
        core, session = _core.init_from_environment(timeout_s)
    else:
        core, session = meeting.init_over(mpi, timeout_s)
    comm = Communicator(core)
    comm.deterministic = deterministic
    if comm.size > 1:
        who = (comm.rank, comm.size, comm.transport == "shm")
        comm._owner_ports.append(
            open_owner_port(session.exchange, *who, session.name, session.token, timeout_s)
        )
        session.close()
    return comm


def _close_owner_ports(ports: list[OwnerPort]) -> None:
    for port in ports:
        port.server.close()
    ports.clear()


def open_communicators() -> list[Communicator]:
    """Communicators of this process that are not closed."""
    return [comm for comm in _open if not comm.closed]


@atexit.register
def _close_all() -> None:
    left_open = open_communicators()
    for comm in left_open:
        comm.close()
    if left_open and threading.active_count() > 1:
        # The threads that wait in the core return now: if they returned while the interpreter
        # ends, they would abort it.
        time.sleep(0.05)
    meeting.finish()


def _disown_all() -> None:
    """Gives up the communicators in a forked process: they belong to the parent."""
    for comm in list(_open):
        comm._disown()


os.register_at_fork(after_in_child=_disown_all)


__all__ = ["Communicator", "Work", "init"]
