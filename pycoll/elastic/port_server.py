"""The server of a rank's port: it accepts connections at any time and authenticates the peers.

It runs on a thread from the start of a world, not only during `shrink` and `agree`: otherwise the
kernel's queue would fill with connections of unauthenticated peers, and the ranks would find no
place in it. A rank that has proved that it belongs to the world stays connected until the decision;
any other connection is dropped after a few seconds, or earlier if there are many, the oldest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pycoll import _core, threads
from pycoll.elastic.messages import (
    BROKEN,
    MAX_LINE,
    NONCE_BYTES,
    Hello,
    read_message,
    write_message,
)
from pycoll.errors import SystemError

_UNPROVED_S = 5.0
_MAX_UNPROVED = _core.max_ranks
_MAX_PROPOSALS = 64  # that a rank keeps; the oldest goes first
_PAUSE_S = 0.1
_POLL_S = 0.05
_TICK_S = 0.25
_WHAT = "the thread of the port for shrink"
_servers: weakref.WeakSet[PortServer] = weakref.WeakSet()

Prove = Callable[[str, int, bytes], str]
T = TypeVar("T")


@dataclass(eq=False)
class Member:
    """An authenticated rank that waits for a decision.

    Attributes:
        writer: Its connection.
        value: What it contributes.
    """

    writer: asyncio.StreamWriter
    value: Any


class PortServer:
    """A rank's listening sockets, and the thread that serves them.

    Attributes:
        ended: Ranks that have ended, as far as authenticated ranks know. Used on the server's
            thread only, as are the other attributes, `members` and `dismiss`.
        changed: Event that is set when the members of an agreement change.
        accepted: What a coordinator has proposed to this rank last, by topic.
        decided: Decisions that this rank knows, by topic; later callers are told at once.
    """

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self.ended: set[int] = set()
        self.changed = asyncio.Event()
        self.accepted: dict[str, Any] = {}
        self.decided: dict[str, Any] = {}
        self._joined: dict[str, dict[int, Member]] = {}
        self._listeners = list(listeners)
        self._rank, self._size = -1, 0
        self._prove: Prove | None = None
        self._sockets: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproved: dict[asyncio.Task[None], None] = {}  # oldest first
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._run, name="pycoll port", daemon=True)
        self._failure = ""
        try:
            threads.start(self._thread, _WHAT)
        except SystemError:
            self._loop.close()
            raise
        _servers.add(self)

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def serve(self, rank: int, size: int, prove: Prove) -> None:
        """Serves as a rank of a world; connections in an earlier world end.

        Args:
            rank: This rank.
            size: Number of ranks of the world.
            prove: Function of a role, a rank and fresh random numbers; returns that rank's proof.
        """

        async def begin() -> None:
            self._rank, self._size, self._prove, self.ended = rank, size, prove, set()
            self.accepted, self.decided = {}, {}
            await cancel([*self._tasks])

        self.run(begin())

    def members(self, topic: str) -> dict[int, Member]:
        """The ranks that wait for a decision on `topic`."""
        return dict(self._joined.get(topic, {}))

    def dismiss(self, topic: str) -> list[Member]:
        """Removes the ranks that wait for a decision on `topic`, and returns them."""
        return [*self._joined.pop(topic, {}).values()]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the server's thread and returns its result; may be interrupted.

        Raises:
            SystemError: The thread has failed.
        """
        tasks: list[asyncio.Task[T]] = []
        done = threading.Event()

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: done.set())

        def stop() -> None:
            tasks[0].cancel()

        try:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(start)
            while not done.wait(_POLL_S):  # signal handlers run in between
                if not self._thread.is_alive():
                    raise SystemError(self._failure)
        except BaseException:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(stop)
                done.wait()
            work.close()
            raise
        return tasks[0].result()

    def close(self) -> None:
        """Closes the port and all connections, and ends the thread; at most once."""
        if os.getpid() == self._pid and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self.close_sockets()

    def close_sockets(self) -> None:
        """Closes the sockets in this process; in a forked process the rank keeps its own."""
        for each in [*self._listeners, *self._sockets]:
            with contextlib.suppress(OSError):
                each.close()
        self._listeners.clear()
        self._sockets.clear()

    def _tick(self) -> None:
        """Looks for calls of other threads: what wakes the loop is a send that may have failed."""
        self._loop.call_later(_TICK_S, self._tick)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread's
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)
        self._tick()
        try:
            self._loop.run_forever()
            for listener in self._listeners:
                self._loop.remove_reader(listener)
            self._loop.run_until_complete(cancel([*asyncio.all_tasks(self._loop)]))
            self._loop.run_until_complete(asyncio.sleep(0))  # transports close their sockets
        except OSError as error:  # the system refuses to poll the sockets
            self._failure = f"{_WHAT} failed: {error}"
            self.close_sockets()
        finally:
            self._loop.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accepts the connections that wait; of too many unauthenticated ones the oldest end."""
        for _ in range(_MAX_UNPROVED):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or memory is left
                self._loop.remove_reader(listener)
                self._loop.call_later(_PAUSE_S, self._resume, listener)
                for oldest in [*self._unproved][: _MAX_UNPROVED // 2]:
                    oldest.cancel()
                return
            connection.setblocking(False)
            self._sockets.add(connection)
            task = self._loop.create_task(self._hear(connection))
            self._tasks.add(task)
            self._unproved[task] = None
            task.add_done_callback(partial(self._forget, connection))
            if len(self._unproved) > _MAX_UNPROVED:
                oldest = next(iter(self._unproved))
                del self._unproved[oldest]
                oldest.cancel()

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unproved.pop(task, None)
        if connection in self._sockets:  # cancelled before it began
            self._sockets.discard(connection)
            connection.close()

    async def _hear(self, connection: socket.socket) -> None:
        """Handles a connection of a rank, or of an unauthenticated peer, which soon times out."""
        task = asyncio.current_task()
        assert task is not None
        hello, writer = None, None
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE)
            with contextlib.suppress(asyncio.TimeoutError):
                hello = await asyncio.wait_for(self._greeted(reader, writer), _UNPROVED_S)
            if hello is not None:
                self._unproved.pop(task, None)
                await self._serve_rank(hello, reader, writer)
        except (*BROKEN, asyncio.CancelledError):
            pass  # otherwise asyncio prints it
        finally:
            if writer is not None:
                self._sockets.discard(connection)
                if hello is None:
                    writer.transport.abort()  # without what the peer has not read
                else:
                    writer.close()

    async def _serve_rank(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Tells a decision, or keeps the rank as a member until it disconnects."""
        topic = hello.topic
        if hello.proposal is not None:
            return
        if topic in self.decided:
            return await write_message(writer, self.decided[topic])
        member = self._joined.setdefault(topic, {})[hello.rank] = Member(writer, hello.value)
        self.changed.set()
        try:
            await reader.read(1)  # until the peer disconnects: it has nothing more to say
        finally:
            joined = self._joined.get(topic, {})
            if joined.get(hello.rank) is member:
                del joined[hello.rank]
                self.changed.set()
            if not joined:
                self._joined.pop(topic, None)

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Hello | None:
        """Authenticates the peer and returns its hello."""
        own = secrets.token_bytes(NONCE_BYTES)
        await write_message(writer, {"nonce": own.hex()})
        hello = Hello.read(await read_message(reader), self._size)
        nonces = own + hello.nonce
        prove = self._prove
        if prove is None or not hmac.compare_digest(
            hello.proof, prove("follower", hello.rank, nonces)
        ):
            return None
        self.ended |= hello.ended - {self._rank}
        answer: dict[str, Any] = {"proof": prove("coordinator", self._rank, nonces)}
        if hello.proposal is not None:
            answer["decided"] = self._take_proposal(hello.topic, hello.proposal)
        await write_message(writer, answer)
        return hello

    def _take_proposal(self, topic: str, proposal: Mapping[str, Any]) -> Any:
        """Accepts a coordinator's proposal, unless there is a decision, which it returns."""
        if topic not in self.decided:
            self.accepted[topic] = proposal
            if len(self.accepted) > _MAX_PROPOSALS:
                del self.accepted[next(iter(self.accepted))]
        return self.decided.get(topic)


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks repeatedly: wait_for before Python 3.12 may swallow a cancellation."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_PAUSE_S)
    await asyncio.gather(*tasks, return_exceptions=True)


def _leave_to_parent() -> None:
    """Closes ports in a forked process, which would keep them open after the rank's death."""
    for server in list(_servers):
        server.close_sockets()


os.register_at_fork(after_in_child=_leave_to_parent)
