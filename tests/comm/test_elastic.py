"""Worlds that go on without the ranks that ended, and that admit new ranks."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import end, start

import pycoll
from pycoll._core import bootstrap
from pycoll.elastic.owner_port import Address, Quorum, host_and_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

Comm = pycoll.Communicator


def until_error(comm: Comm) -> pycoll.Error:
    x = np.ones(8, np.float32)
    while True:
        try:
            comm.all_reduce(x, "max")
        except pycoll.Error as error:
            return error


def survivor(comm: Comm, dying: set[int]) -> tuple[int, list[int], list[float]]:
    """Goes on without the dying ranks; returns the new rank, and the old ranks twice."""
    if comm.rank in dying:
        comm.all_reduce(np.ones(8, np.float32), "max")
        os.kill(os.getpid(), signal.SIGKILL)
    former = comm.rank
    until_error(comm)
    with comm.shrink(10) as new:
        assert comm.closed and new.size == len(new.former_ranks)
        gathered = new.all_gather(np.array([float(former)]))
        return new.rank, new.former_ranks, gathered.ravel().tolist()


def test_shrink_after_kill_gives_the_others_in_order():
    for size, dying in [(2, {1}), (3, {0}), (5, {1, 3}), (4, {0, 1, 3})]:
        left = sorted(set(range(size)) - dying)
        outcomes = end(start(survivor, size, dying))
        for new, rank in enumerate(left):
            assert outcomes[rank] == (new, left, [float(each) for each in left])
        assert all(outcomes[rank] == "killed by SIGKILL" for rank in dying)


def test_rank_has_ended_before_the_kernel_has_freed_its_memory():
    """Freeing 600 MB takes tens of milliseconds; the others have seen the death by then."""

    def work(comm: Comm) -> bool:
        pids = comm.all_gather(np.array([os.getpid()])).ravel()
        pidfd = os.pidfd_open(int(pids[1]))
        comm.barrier()
        if comm.rank == 1:
            memory = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE)  # in pages of 4 KiB
            memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)
            os.kill(os.getpid(), signal.SIGKILL)
        assert "rank 1 was ended by signal 9 (Killed)" in str(until_error(comm))
        has_been_freed = bool(select.select([pidfd], [], [], 0)[0])
        os.close(pidfd)
        with comm.shrink() as new:
            assert new.former_ranks == [0, 2]
        return has_been_freed

    assert end(start(work, 3))[::2] == [False, False]


def test_shrink_ends_waits_for_its_caller():
    """Rank 1 waits for a message of rank 2, which hears of the death in a group and shrinks."""

    def work(comm: Comm) -> list[int]:
        group = comm.group([0, 2])
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(pycoll.PeerDiedError) as raised:
            group.barrier() if group else comm.recv(np.empty(1), 2)
        assert raised.value.rank == 0
        with comm.shrink(10) as new:
            return new.former_ranks

    assert end(start(work, 3))[1:] == [[1, 2], [1, 2]]


def test_shrink_twice_and_of_a_whole_world():
    def work(comm: Comm) -> list[int]:
        whole = comm.shrink(10)
        assert whole.former_ranks == [0, 1, 2]
        if whole.rank == 2:
            os._exit(0)
        until_error(whole)
        pair = whole.shrink(10)
        if pair.rank == 1:
            os._exit(0)
        until_error(pair)
        last = pair.shrink(10)
        assert last.all_reduce(np.ones(2)).tolist() == [1, 1]
        return last.former_ranks

    assert end(start(work, 3))[0] == [0]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("before", ["bootstrap.TcpStore", "connect_ranks"])
def test_rank_that_ends_within_shrink_is_left_out(victim, before):
    """Once the ranks have agreed: the others agree again, whichever step each of them is in."""

    def work(comm: Comm) -> tuple[list[int], float]:
        if comm.rank == victim:
            with mock.patch(f"pycoll._core.{before}", lambda *_, **__: os.kill(os.getpid(), 9)):
                comm.shrink(10)
        new = comm.shrink(10)
        return new.former_ranks, new.all_reduce(np.ones(1)).item()

    others = [rank for rank in range(3) if rank != victim]
    outcomes = end(start(work, 3))
    assert outcomes[victim] == "killed by SIGKILL"
    assert [outcomes[rank] for rank in others] == [(others, 2.0)] * 2


@pytest.mark.parametrize("victim", [0, 2])
def test_rank_that_ends_within_grow_is_named_by_all(victim):
    """Rank 0 waits for a newcomer, and the others for rank 0."""
    where = address()

    def work(comm: Comm) -> int:
        if comm.rank == victim:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(pycoll.PeerDiedError) as raised:
            comm.grow(1, where, 10)
        return raised.value.rank

    outcomes = end(start(work, 3))
    assert [outcomes[rank] for rank in range(3) if rank != victim] == [victim] * 2


def test_rank_that_ends_when_the_grown_world_is_complete_leaves_the_others_in_it():
    """Rank 0 waits until all know the addresses; the others do not wait for the victim any more."""
    where = address()

    def end_when_all_know(store: Any, rank: int, _: int) -> Callable[..., None]:
        def exchange(topic: str, own: str, timeout_s: float) -> None:
            store.set(f"{topic}/{rank}", own)
            store.get(f"{topic}s", timeout_s)
            os.kill(os.getpid(), signal.SIGKILL)

        return exchange

    def work(comm: Comm) -> list[int]:
        if comm.rank == 1:
            with mock.patch("pycoll.elastic.resize.exchange_through", end_when_all_know):
                comm.grow(1, where, 10)
        return comm.grow(1, where, 10).shrink(10).former_ranks

    processes = start(work, 3) + start(lambda: pycoll.join(where, 10).shrink(10).former_ranks, 0)
    assert end(processes) == [[0, 2, 3], "killed by SIGKILL", [0, 2, 3], [0, 2, 3]]


def test_newcomer_hears_of_the_death_of_a_member():
    """It does not know the members' processes; rank 0, which watches them, tells it."""
    name = f"{os.getpid()}-newcomer"

    def form(rank: int, **watched: Any) -> tuple[int, int, str]:
        with pytest.raises(pycoll.PeerDiedError) as raised:
            bootstrap.form_local_group(name, rank, 3, 4096, "secret", 10, **watched)
        return raised.value.rank, raised.value.signal, str(raised.value)

    def num_sockets() -> int:
        lines = Path("/proc/net/unix").read_text().splitlines()
        return sum(line.endswith(f" @pycoll-{name}") for line in lines)

    def work(comm: Comm) -> tuple[int, int, str]:
        if comm.rank == 0:
            return form(0, old=comm, members=[0, 1])
        end_s = time.monotonic() + 10
        # The leader listens, and the newcomer has connected; this rank never joins.
        while num_sockets() < 2 and time.monotonic() < end_s:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    processes = start(work, 2) + start(form, 0, 2)
    of_member, _, of_newcomer = end(processes)
    assert of_newcomer == of_member
    assert of_newcomer[:2] == (1, signal.SIGKILL)


def num_descriptors() -> int:
    """The least of several counts: connections that ranks use for a look end a moment later."""
    found = []
    for _ in range(20):
        found.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.005)
    return min(found)


def test_shrink_keeps_the_settings_and_leaves_no_descriptor_behind():
    def work(comm: Comm) -> int:
        comm.deterministic, comm.register_after = True, 3
        num_fds = []
        for _ in range(3):
            timeout_s = comm.timeout_s
            comm = comm.shrink(10)
            assert (comm.deterministic, comm.register_after) == (True, 3)
            assert comm.timeout_s == timeout_s
            comm.all_reduce(np.ones(1))
            num_fds.append(num_descriptors())
        assert num_fds[0] == num_fds[1] == num_fds[2], num_fds
        comm.close()
        return num_fds[0] - len(os.listdir("/proc/self/fd"))

    assert min(end(start(work, 2))) > 0


def mapped_memories() -> set[str]:
    """Inodes of the shared memories of communicators that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:pycoll" in line}


def test_worlds_after_shrink_share_no_memory_name_or_key():
    """The number of a rank's port stays, and serves the new world alone: see `OwnerPort`."""

    def work(comm: Comm) -> bool:
        held = comm.empty(1 << 12, np.float32)
        former, memories, names, keys = comm._owner_ports[-1], [mapped_memories()], set(), set()
        for _ in range(3):
            names.add(comm._group()["name"])
            keys.add(comm._owner_ports[-1].secret)
            new = comm.shrink(10)
            held[...] = 7  # of the world before
            x = new.empty(1 << 12, np.float32)
            x[...] = new.rank
            new.all_reduce(x, out=x)
            assert (x == 1).all() and (held == 7).all()
            memories.append(mapped_memories() - memories[-1])
            assert memories[-1], "the new world has its own memory"
            comm = new
        assert len(names) == len(keys) == 3
        if comm.rank == 0:
            with socket.create_connection(("127.0.0.1", former.own.port)) as s:
                file = s.makefile("rb")
                nonces = bytes.fromhex(json.loads(file.readline())["nonce"]) + bytes(32)
                hello = {"rank": 1, "nonce": bytes(32).hex(), "ended": [], "topic": "shrink"}
                proof = former.proof("follower", 1, nonces)  # of the first world
                s.sendall(json.dumps(hello | {"proof": proof, "value": None}).encode() + b"\n")
                assert file.read() == b""
        comm.barrier()
        return True

    assert end(start(work, 2)) == [True, True]


def test_minority_may_not_go_on_without_ranks_that_live():
    def work(comm: Comm, late: set[int]) -> str:
        if comm.rank in late:
            time.sleep(1.2)  # alive all the time
        try:
            with comm.shrink(0.3):
                # A world that has ended would keep no other rank from going on.
                time.sleep(2 if late == {1} else 0)
        except pycoll.Error as error:
            return f"{type(error).__name__}: {error}"
        return "went on"

    lonely, pair, minority = (start(work, n, late) for n, late in [(2, {0}), (2, {1}), (3, {1, 2})])
    text = end(lonely)[1]
    assert text.startswith("TimeoutError: shrink: rank 0 did not call it within 0.3 s"), text
    first, second = end(pair)
    # Just half of the ranks, but with the lowest.
    assert first == "went on"
    assert second.startswith("TimeoutError: shrink: rank 0 did not call it"), second
    expected = "PeerDiedError: shrink: only rank 0 of 3 came; ranks 1, 2 may go on elsewhere"
    text = end(minority)[0]
    assert text.startswith(expected), text


@given(st.integers(1, 9), st.data())
def test_no_two_parts_of_a_world_may_both_go_on(size, data):
    """With any ranks ended, any of them known to have ended, and the network cut anywhere."""
    part = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    ended = {rank for rank in range(size) if part[rank] == 3}
    may = []
    for side in range(3):
        members = [rank for rank in range(size) if part[rank] == side]
        known = data.draw(st.sets(st.sampled_from(sorted(ended)))) if ended else set()
        may.append(bool(members) and Quorum.of_world(size).is_met(members, known))
    assert sum(may) <= 1


def test_world_that_not_all_have_joined_needs_a_majority_of_the_world_before():
    """Rank 0 of 5 decided for 0, 1 and 2, told only rank 1, and ended: 2, 3 and 4 may go on."""
    before = Quorum.of_world(5)
    assert before.is_met([2, 3, 4], [0])
    among_three = [before.among([0, 1, 2], []), Quorum.of_world(3)]
    assert [one.is_met([1], [0]) for one in among_three] == [False, True]
    assert all(one.is_met([1, 2], [0]) for one in among_three)  # then 3 and 4 may not
    # Had 3 and 4 ended before:
    assert before.among([0, 1, 2], [3, 4]).is_met([1, 2], [0])


def test_all_that_live_may_go_on_however_many_have_ended():
    for size, count in itertools.product(range(1, 6), range(1, 6)):
        for members in itertools.combinations(range(size), min(count, size)):
            dead = set(range(size)) - set(members)
            assert Quorum.of_world(size).is_met(members, dead)


def shrink_of(comm: Comm, what: str) -> str:
    if what == "split":
        comm = comm.split(0)
    elif what == "closed":
        comm.close()
    elif what == "again":
        comm.shrink(10)
    with pytest.raises(pycoll.UsageError) as raised:
        comm.shrink(1)
    return str(raised.value)


def test_shrink_of_other_communicators_is_an_error_that_says_so():
    for what in ("split", "closed", "again", "threads"):
        for text in pycoll.run_ranks(shrink_of, 2, what, threads=what == "threads"):
            assert "expected a communicator of several processes" in text, what


def test_unauthenticated_peers_do_not_delay_a_shrink():
    def work(comm: Comm) -> int:
        port = comm._owner_ports[-1].addresses[0].port
        peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for i, peer in enumerate(peers):
            # Nothing, bytes that mean nothing, messages without and with a wrong proof.
            text = [b"", os.urandom(300), b"{}\n", b'{"rank":1,"nonce":"","ended":[0]}\n'][i % 4]
            peer.send(text + (b'{"rank":1,"nonce":"00","ended":[],"proof":"1"}\n' * (i % 5)))
        comm.barrier()
        start = time.monotonic()
        new = comm.shrink(60)
        assert time.monotonic() - start < 20
        return new.size

    assert end(start(work, 3)) == [3, 3, 3]


def test_interrupt_ends_the_wait_for_other_ranks():
    def work(comm: Comm) -> str:
        if comm.rank == 1:
            time.sleep(1.5)
            return ""
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            comm.shrink(30)
        assert "pycoll shrink" not in [thread.name for thread in threading.enumerate()]
        return "interrupted"

    assert end(start(work, 2))[0] == "interrupted"


def test_forked_child_does_not_keep_the_rank_alive():
    def work(comm: Comm) -> list[int]:
        if comm.rank == 1 and (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        child = comm.broadcast(np.array([child if comm.rank == 1 else 0]), root=1)[0]
        comm.barrier()
        if comm.rank == 1:
            os._exit(0)
        until_error(comm)
        try:
            return comm.shrink(10).former_ranks
        finally:
            os.kill(int(child), signal.SIGKILL)

    assert end(start(work, 2))[0] == [0]


# --- new ranks ---


def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def newcomer(where: str, delay_s: float = 0) -> Callable[[], Any]:
    def work() -> Any:
        time.sleep(delay_s)
        with pycoll.join(where, timeout_s=10) as comm:
            return comm.rank, comm.former_ranks, comm.all_reduce(np.ones(1)).tolist()

    return work


@pytest.mark.parametrize("size, num_new", [(1, 1), (2, 3)])
def test_grow_puts_newcomers_behind_the_old_ranks(size, num_new):
    where = address()

    def work(comm: Comm) -> Any:
        with comm.grow(num_new, where, timeout_s=10) as new:
            assert comm.closed
            return new.rank, new.former_ranks, new.all_reduce(np.ones(1)).tolist()

    late = [newcomer(where, 0.2 * i) for i in range(num_new)]
    outcomes = end(start(work, size) + [pid for each in late for pid in start(each, 0)])
    former = list(range(size)) + [-1] * num_new
    # Newcomers that wait for the world look again only now and then: any of them may be first.
    assert [outcome[0] for outcome in outcomes[:size]] == list(range(size))
    assert sorted(outcomes) == [(rank, former, [size + num_new]) for rank in range(size + num_new)]


def test_too_few_newcomers_leave_the_old_world_as_it_was():
    where = address()

    def work(comm: Comm) -> list[float]:
        with pytest.raises(pycoll.TimeoutError, match="1 of 2 newcomers came within 0.7 s"):
            comm.grow(2, where, timeout_s=0.7)
        return comm.all_reduce(np.ones(1)).tolist()

    def early() -> str:
        with pytest.raises(pycoll.TimeoutError, match="1 of 2 newcomers"):
            pycoll.join(where, timeout_s=5)
        return "told"

    assert end(start(work, 2) + start(early, 0)) == [[2.0], [2.0], "told"]


def test_newcomer_too_many_and_newcomer_with_another_token_are_refused():
    where = address()

    def work(comm: Comm) -> int:
        time.sleep(0.3)
        return comm.grow(1, where, timeout_s=10).size

    def other_token() -> str:
        os.environ["PYCOLL_TOKEN"] = "of another job"
        with pytest.raises(pycoll.Error) as raised:
            pycoll.join(where, timeout_s=1)
        return str(raised.value)

    def too_many() -> str:
        try:
            return f"rank {pycoll.join(where, timeout_s=2).rank}"
        except (pycoll.UsageError, pycoll.TimeoutError) as error:
            return str(error)

    *worlds, unauthenticated, one, two = end(
        start(work, 2) + start(other_token, 0) + start(too_many, 0) + start(too_many, 0)
    )
    assert worlds == [3, 3]
    assert "PYCOLL_TOKEN" in unauthenticated
    assert "rank 2" in (one, two)
    refused = two if one == "rank 2" else one
    # Whether the store was still there when it came.
    wanted = f"join: the world at {where} takes 1 newcomers, this is number 2"
    assert refused == wanted or f"no world takes newcomers at {where}" in refused


def test_shrink_and_grow_again_go_on_with_the_same_state():
    """Kill one, go on with two, take a newcomer that gets the state by a broadcast."""
    where = address()

    def steps(comm: Comm, state: np.ndarray, until: float) -> np.ndarray:
        while state[0] < until:
            state = comm.all_reduce(state, "max") + 1
        return state

    def work(comm: Comm) -> list[float]:
        state = steps(comm, np.zeros(4), 10)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(pycoll.PeerDiedError):
            steps(comm, state, 20)
        comm = comm.shrink(10).grow(1, where, timeout_s=10)
        return steps(comm, comm.broadcast(state, root=0), 30).tolist()

    def fresh() -> list[float]:
        comm = pycoll.join(where, timeout_s=20)
        return steps(comm, comm.broadcast(np.zeros(4), root=0), 30).tolist()

    outcomes = end(start(work, 3) + start(fresh, 0))
    assert outcomes[1] == "killed by SIGKILL"
    assert outcomes[0] == outcomes[2] == outcomes[3] == [30.0] * 4


@pytest.mark.pure
def test_addresses_are_read_as_they_are_written():
    for text in ("", "host", "host:", "host:x", ":29500", "host:0", "host:70000"):
        with pytest.raises(pycoll.UsageError, match="expected 'host:port'"):
            host_and_port(text)
    assert host_and_port("[fd00::1]:29500") == ("fd00::1", 29500)
    assert host_and_port("a.b:1") == ("a.b", 1)
    where = Address(("10.0.0.1", "fd00::1"), 4000)
    assert Address.of_rank(0, where.to_text().encode()) == where
