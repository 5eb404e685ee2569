"""Ranks of one host pass each other memory and pidfds, and name the ranks that are missing."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import random
import resource
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import pytest

from pycoll import errors
from pycoll._core import bootstrap

from .conftest import Outcome, num_open_fds, wait_until_listening

pytestmark = pytest.mark.ranks

NBYTES = 1 << 16
# Beside a test with a hundred ranks, 64 forks alone take more than 10 s.
PATIENCE_S = 60
F_GET_SEALS = 1034
F_SEAL_SHRINK_AND_GROW = 2 | 4
OTHER_UID = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()}-{abs(hash(request.node.name)):x}"


def form(
    name: str, rank: int, num_ranks: int, timeout_s: float = 10, **other: Any
) -> bootstrap.LocalGroup:
    arguments = {"shared_bytes": NBYTES, "token": "secret", **other}
    return bootstrap.form_local_group(name, rank, num_ranks, timeout_s=timeout_s, **arguments)


def share(group: bootstrap.LocalGroup, rank: int, num_ranks: int) -> bytes:
    """Writes this rank's byte and waits until it sees the bytes of all ranks."""
    deadline = time.monotonic() + PATIENCE_S
    with mmap.mmap(group.memory_fd, NBYTES) as memory:
        memory[rank] = rank + 1
        while 0 in memory[:num_ranks]:
            assert time.monotonic() < deadline, memory[:num_ranks]
            time.sleep(0.001)
        return memory[:num_ranks]


def form_and_share(name: str, rank: int, num_ranks: int, delay_s: float = 0) -> dict[str, Any]:
    time.sleep(delay_s)
    group = form(name, rank, num_ranks, timeout_s=PATIENCE_S)
    facts = {
        "bytes": share(group, rank, num_ranks),
        "pids": list(group.pids),
        "pid": os.getpid(),
        "num_pidfds": len(group.pidfds),
        "pidfds": [_pid_of(fd) for fd in group.pidfds],
        "inheritable": [os.get_inheritable(fd) for fd in (group.memory_fd, *group.pidfds)],
        "link": os.readlink(f"/proc/self/fd/{group.memory_fd}"),
    }
    group.close()
    return facts


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))


def check_group(outcomes: list[Outcome], order: list[int]) -> None:
    num_ranks = len(order)
    assert [outcome.text for outcome in outcomes] == [""] * num_ranks
    pids = [
        outcome.value["pid"]
        for _, outcome in sorted(zip(order, outcomes, strict=True), key=lambda pair: pair[0])
    ]
    for outcome in outcomes:
        assert outcome.value["bytes"] == bytes(range(1, num_ranks + 1))
        assert outcome.value["pids"] == pids
        assert outcome.value["num_pidfds"] == num_ranks
        # A rank that has ended and was reaped reads as -1.
        assert all(
            seen in (pid, -1) for seen, pid in zip(outcome.value["pidfds"], pids, strict=True)
        )
        assert not any(outcome.value["inheritable"])
        assert outcome.value["link"].startswith("/memfd:")  # so not in /dev/shm
        assert outcome.num_fds_leaked == 0


@pytest.mark.slow
def test_groups_that_join_in_random_order_share_memory_and_pidfds(ranks, name):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    for i, num_ranks in enumerate([1, 2, 3, 5, 8, *(choose.randrange(2, 9) for _ in range(8)), 64]):
        order = choose.sample(range(num_ranks), num_ranks)
        delays = [choose.choice([0, 0, 0.001, 0.01]) for _ in order]
        outcomes = ranks.run(
            lambda rank, n=num_ranks, delays=delays, i=i: form_and_share(
                f"{name}-{i}", rank, n, delays[rank]
            ),
            order,
        )
        check_group(outcomes, order)
        with open("/proc/net/unix") as sockets:
            assert f"@pycoll-{name}" not in sockets.read()


def test_memory_of_a_group_can_neither_shrink_nor_grow(name):
    group = form(name, 0, 1)
    seals = fcntl.fcntl(group.memory_fd, F_GET_SEALS)
    assert seals & F_SEAL_SHRINK_AND_GROW == F_SEAL_SHRINK_AND_GROW
    for nbytes in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(group.memory_fd, nbytes)
    assert os.fstat(group.memory_fd).st_size == NBYTES
    group.close()


def test_missing_ranks_are_named_on_every_rank_that_joined(ranks, name):
    for num_ranks, present, text in [
        (8, [3, 0, 7, 1, 4, 6], "ranks 2, 5 of 8 did not join within 0.7 s"),
        (3, [1, 2], "rank 0 of 3 did not join within 0.7 s"),
    ]:
        outcomes = ranks.run(lambda rank, n=num_ranks: form(name, rank, n, 0.7), present)
        for outcome in outcomes:
            assert outcome.error == "TimeoutError"
            assert outcome.text.startswith(text + ":")
            assert outcome.num_fds_leaked == 0


def test_first_deadline_to_pass_ends_the_joining_for_all(ranks, name):
    timeouts = {0: 30.0, 1: 30.0, 2: 0.3}
    outcomes = ranks.run(lambda rank: form(name, rank, 4, timeouts[rank]), range(3))
    for outcome in outcomes:
        assert outcome.error == "TimeoutError"
        assert outcome.text.startswith("rank 3 of 4 did not join within 0.3 s")
        assert outcome.seconds < 20


@pytest.mark.parametrize(
    ("victim", "number"), [(2, signal.SIGKILL), (2, signal.SIGTERM), (0, signal.SIGKILL)]
)
def test_rank_killed_while_it_joins_is_named_on_every_other(ranks, name, victim, number):
    pids = [ranks.start(lambda rank=rank: form(name, rank, 4, 30)) for rank in range(3)]
    wait_until_listening(f"pycoll-{name}")
    time.sleep(0.3)  # rank 3 never joins
    os.kill(pids[victim], number)
    for pid in set(pids) - {pids[victim]}:
        outcome = ranks.outcome(pid)
        assert (outcome.error, outcome.rank) == ("PeerDiedError", victim)
        if victim != 0:  # the leader knows the pids
            assert outcome.signal == number
            assert f"rank {victim} (process {pids[victim]}) ended" in outcome.text
        assert outcome.seconds < 20
        assert outcome.num_fds_leaked == 0


def test_rank_killed_before_it_said_its_rank_is_the_one_that_is_missing(ranks, name):
    pids = [ranks.start(lambda rank=rank: form(name, rank, 3, 30)) for rank in range(2)]
    wait_until_listening(f"pycoll-{name}")

    def connect_and_die() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"\0pycoll-{name}")
            os.kill(os.getpid(), signal.SIGKILL)

    victim = ranks.start(connect_and_die)
    ranks.outcome(victim)
    for outcome in map(ranks.outcome, pids):
        assert (outcome.error, outcome.rank) == ("PeerDiedError", 2), outcome
        assert f"rank 2 (process {victim}) ended before it said its rank" in outcome.text
        assert outcome.seconds < 20


def test_late_leader_is_waited_for(ranks, name):
    delays = {0: 0.5, 1: 0.0, 2: 0.0}
    outcomes = ranks.run(lambda rank: form_and_share(name, rank, 3, delays[rank]), range(3))
    assert [outcome.text for outcome in outcomes] == [""] * 3


def test_rank_that_does_not_fit_is_refused_and_disturbs_no_other(ranks, name):
    leader = ranks.start(lambda: form_and_share(name, 0, 3))
    for rank, num_ranks, other, text in [
        (1, 3, {"token": "guess"}, "session token differs from the leader's"),
        (1, 3, {"shared_bytes": NBYTES + 1}, f"expects {NBYTES + 1} bytes of shared memory"),
        (1, 4, {}, "it expects 4 ranks, the leader 3"),
        (3, 4, {"shared_bytes": 1}, "it expects 4 ranks, the leader 3"),
    ]:
        with pytest.raises(errors.UsageError, match=f"rank {rank} cannot join.*{text}"):
            form(name, rank, num_ranks, **other)
    rest = ranks.run(lambda rank: form_and_share(name, rank, 3), [1, 2])
    assert [outcome.text for outcome in (ranks.outcome(leader), *rest)] == [""] * 3


def test_second_process_with_the_same_rank_is_refused(ranks, name):
    leader = ranks.start(lambda: form_and_share(name, 0, 3))
    first = ranks.start(lambda: form_and_share(name, 1, 3))
    time.sleep(0.3)
    with pytest.raises(errors.UsageError, match="another process has joined as this rank"):
        form(name, 1, 3)
    last = ranks.start(lambda: form_and_share(name, 2, 3))
    assert [ranks.outcome(pid).text for pid in (leader, first, last)] == [""] * 3


def _connect(name: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(f"\0pycoll-{name}")
    return peer


def _send_garbage(peer: socket.socket) -> None:
    for message in (b"", b"\x00", b"\x00\xff\xff\xff\xff", b"\x02" * 300, os.urandom(5000)):
        try:
            peer.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return


def _send_many_fds(peer: socket.socket) -> None:
    with open("/dev/null") as null:
        fds = array.array("i", [null.fileno()] * 100)
        peer.sendmsg([b"\x00"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


@pytest.mark.parametrize("act", [_send_garbage, _send_many_fds, lambda peer: None])
def test_unauthenticated_peers_are_dropped_without_harm(ranks, name, act):
    leader = ranks.start(lambda: form_and_share(name, 0, 2))
    wait_until_listening(f"pycoll-{name}")
    peers = []
    for _ in range(520):  # more than are kept
        peers.append(_connect(name))
        act(peers[-1])
    peers[0].settimeout(5)
    with suppress(ConnectionResetError):
        assert peers[0].recv(100) == b""  # the oldest gave way, at the latest
    last = ranks.start(lambda: form_and_share(name, 1, 2))
    for pid in (last, leader):
        outcome = ranks.outcome(pid)
        assert outcome.text == ""
        assert outcome.num_fds_leaked == 0
    for peer in peers:
        peer.close()


@as_root
def test_another_user_that_knows_the_token_cannot_join(ranks, name):
    def join_as_other_user() -> bytes:
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
        token = b"secret"
        hello = struct.pack("<BI", 0, len(token)) + token + struct.pack("<iiQ", 1, 2, NBYTES)
        pidfd = os.pidfd_open(os.getpid())
        with _connect(name) as peer, suppress(BrokenPipeError, ConnectionResetError):
            peer.settimeout(5)
            socket.send_fds(peer, [hello], [pidfd])
            return peer.recv(1000)
        return b""

    leader = ranks.start(lambda: form_and_share(name, 0, 2))
    wait_until_listening(f"pycoll-{name}")
    assert ranks.outcome(ranks.start(join_as_other_user)).value == b""
    last = ranks.start(lambda: form_and_share(name, 1, 2))
    assert [ranks.outcome(pid).text for pid in (last, leader)] == ["", ""]


def test_leader_that_fails_before_it_reads_a_hello_is_understood(ranks, name):
    text = b"ranks 2, 3 of 4 did not join within 1 s"
    failure = struct.pack("<BBI", 3, 0, len(text)) + text + struct.pack("<ii", 0, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0pycoll-{name}")
        listener.listen()
        pid = ranks.start(lambda: form(name, 1, 4))
        connection, _ = listener.accept()
        time.sleep(0.2)  # until the hello is there: closing over it resets the connection
        connection.send(failure)
        connection.close()
    outcome = ranks.outcome(pid)
    assert (outcome.error, outcome.text.encode()) == ("TimeoutError", text)


@as_root
def test_another_user_cannot_lead(ranks, name):
    def lead_as_other_user() -> None:
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
        form(name, 0, 2, 2)

    ranks.start(lead_as_other_user)
    wait_until_listening(f"pycoll-{name}")
    with pytest.raises(errors.TimeoutError, match="rank 0 of 2 did not join"):
        form(name, 1, 2, 0.5)


def test_rank_without_room_for_descriptors_says_so(ranks, name):
    def join_with_few_descriptors() -> None:
        limit = num_open_fds() + 4
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        form(name, 1, 8)

    full = ranks.start(join_with_few_descriptors)
    rest = [ranks.start(lambda r=rank: form(name, r, 8).close()) for rank in (0, *range(2, 8))]
    outcome = ranks.outcome(full)
    assert outcome.error == "SystemError"
    assert "may have too many open files (see ulimit -n)" in outcome.text
    assert outcome.num_fds_leaked == 0
    assert [ranks.outcome(pid).text for pid in rest] == [""] * 7


def test_impossible_rank_or_size_is_refused(name):
    for rank, num_ranks, text in [
        (0, 0, "1 to 252 ranks, not 0"),
        (0, 253, "not 253"),
        (4, 4, "rank 4 does not exist among"),
        (-1, 4, "rank -1"),
    ]:
        with pytest.raises(errors.UsageError, match=text):
            form(name, rank, num_ranks)
