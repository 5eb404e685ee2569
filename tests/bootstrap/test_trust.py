"""Which processes may join, with and without a token; what other processes can hear and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pycoll import errors
from pycoll._core import bootstrap, init_from_environment

from . import store_client
from .conftest import Outcome, wait_until_listening

pytestmark = pytest.mark.ranks

TOKEN = "hunter2-hunter2-hunter2"
OTHER_UID = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A program that listens at a port: `answer` serves its connections. Yields what it hears."""
    heard: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            with end, contextlib.suppress(OSError, AssertionError):
                end.settimeout(1)
                heard.append(end.recv(4096, socket.MSG_PEEK))
                answer(end)
                heard.append(end.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], heard
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def accept_with(proof: Callable[[bytes, bytes], bytes]) -> Callable[[socket.socket], None]:
    """Sends a challenge, and then accepts with `proof(number of the client, its proof)`."""

    def answer(end: socket.socket) -> None:
        hello = store_client.read_raw_frame(end)
        challenge = store_client.text(bytes(16))
        end.sendall(store_client.frame(store_client.CHALLENGE, challenge, hello[1]))
        theirs = store_client.read_raw_frame(end)
        own = store_client.text(proof(hello[2][-16:], theirs[2][-32:]))
        end.sendall(store_client.frame(store_client.OK, own, theirs[1]))

    return answer


def test_squatter_on_the_port_hears_no_token_and_is_not_trusted():
    answers = {
        "silent": lambda end: time.sleep(0.2),
        "closes": lambda end: None,
        "accepts without a proof": accept_with(lambda number, proof: b""),
        "accepts with any proof": accept_with(lambda number, proof: os.urandom(32)),
        "sends the proof back": accept_with(lambda number, proof: proof),
        "knows another token": accept_with(
            lambda number, proof: store_client.proof("guess", b"accept", 1, number, bytes(16))
        ),
    }
    for name, answer in answers.items():
        with listening(answer) as (port, heard):
            with pytest.raises(errors.TimeoutError, match="rank 1 could not reach") as raised:
                bootstrap.TcpStore("127.0.0.1", port, TOKEN, 1, 0.3)
            assert raised.type is errors.TimeoutError, name
            if name not in ("silent", "closes"):
                assert "does not know the session token" in str(raised.value), name
        said = b"".join(heard)
        assert store_client.MAGIC in said and b"hunter2" not in said, name


def test_recorded_handshake_opens_nothing(server):
    recorded: list[bytes] = []
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as member:
        number = os.urandom(16)
        member.sendall(store_client.hello(1, number))
        _, challenge = store_client.read_frame(member)
        right = store_client.proof("secret", b"connect", 1, number, challenge)
        last = store_client.frame(store_client.PROOF, store_client.text(right), 2)
        member.sendall(last)
        kind, answer = store_client.read_frame(member)
        assert kind == store_client.OK
        recorded += [store_client.hello(1, number), last]
        server_proof = answer
    for again in (last, store_client.frame(store_client.PROOF, store_client.text(server_proof), 2)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as other:
            other.sendall(recorded[0])
            _, fresh = store_client.read_frame(other)
            assert fresh != challenge
            other.sendall(again)
            assert store_client.read_frame(other) == (store_client.REFUSED, b"")
            assert store_client.read_frame(other) is None
            with contextlib.suppress(OSError):  # a request in place of a second try
                other.sendall(store_client.frame(store_client.SET, store_client.text(b"key") * 2))
            assert store_client.read(other, 1) == b""


def test_second_claim_of_a_rank_is_refused_and_does_not_disturb_the_first(server):
    first = bootstrap.TcpStore("127.0.0.1", server.port, "secret", 1, 5)
    text = r"rank 1 has already joined that session from 127\.0\.0\.1:\d+: two processes"
    with pytest.raises(errors.TimeoutError, match=text):
        bootstrap.TcpStore("127.0.0.1", server.port, "secret", 1, 0.1)
    first.set("key", b"value")
    assert first.get("key", 5) == b"value"
    report = first.get("store/second_claims", 5).decode()
    assert report.startswith("rank 1 has joined from 127.0.0.1:"), report
    assert "a second claim of it was refused (from 127.0.0.1:" in report


def env(rank: int, num_ranks: int, port: int, local: bool = False) -> bootstrap.LaunchEnv:
    return bootstrap.LaunchEnv(rank, num_ranks, "127.0.0.1", port, TOKEN, local)


def wait_until_arrived(port: int, local: bool, ranks_bits: int) -> None:
    """Waits until exactly these ranks of the job at that port have arrived."""
    store = bootstrap.TcpStore("127.0.0.1", port, TOKEN, 99, 10, local)
    deadline = time.monotonic() + 10
    while store.add("join/arrived/0", 0) != ranks_bits:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("local", [False, True], ids=["token", "no token"])
def test_join_with_two_processes_of_one_rank_says_so_on_every_rank(ranks, port, local):
    def join(rank: int, timeout_s: float) -> None:
        bootstrap.join(env(rank, 3, port, local), timeout_s)

    pids = [ranks.start(lambda r=r: join(r, 1.0)) for r in (0, 1)]
    wait_until_arrived(port, local, 0b011)
    second = ranks.outcome(ranks.start(lambda: join(1, 0.2)))
    where = "process" if local else "127.0.0.1:"
    assert second.error == "TimeoutError", second
    assert f"rank 1 has already joined that session from {where}" in second.text, second
    for outcome in map(ranks.outcome, pids):
        assert outcome.error == "TimeoutError"
        assert "rank 2 of 3 did not join within 1 s" in outcome.text
        assert f"rank 1 has joined from {where}" in outcome.text, outcome
        assert f"a second claim of it was refused (from {where}" in outcome.text, outcome


@pytest.mark.parametrize("local", [False, True], ids=["token", "no token"])
def test_rank_killed_while_others_wait_is_named_at_once(ranks, port, local):
    pids = [
        ranks.start(lambda r=rank: bootstrap.join(env(r, 4, port, local), 30)) for rank in range(3)
    ]
    wait_until_arrived(port, local, 0b0111)  # rank 3 never comes
    os.kill(pids[2], signal.SIGKILL)
    for pid in pids[:2]:
        outcome = ranks.outcome(pid)
        assert (outcome.error, outcome.rank) == ("PeerDiedError", 2), outcome
        assert "rank 2 ended while the ranks were joining: its connection" in outcome.text
        assert outcome.seconds < 20
        assert outcome.num_fds_leaked == 0


def test_rank_killed_before_it_said_its_rank_is_the_one_that_is_missing(ranks, port):
    pids = [
        ranks.start(lambda r=rank: bootstrap.join(env(r, 3, port, True), 30)) for rank in range(2)
    ]
    wait_until_listening(f"pycoll-store-{port}")
    victim = ranks.start(lambda: socket.socket(socket.AF_UNIX).connect(abstract(port)))
    ranks.outcome(victim)
    for outcome in map(ranks.outcome, pids):
        assert (outcome.error, outcome.rank) == ("PeerDiedError", 2), outcome
        assert f"process {victim} ended before it said its rank" in outcome.text
        assert outcome.seconds < 20


def test_rank_that_leaves_on_purpose_is_not_dead(ranks, port):
    def join_and_leave(rank: int) -> bytes:
        session = bootstrap.join(env(rank, 3, port), 10)
        if rank == 2:
            session.close()
            return b""
        time.sleep(0.2)  # until rank 2 has left
        if rank == 1:
            return session.get("late", 10)
        time.sleep(0.2)
        session.set("late", "value")
        time.sleep(0.2)
        return b"value"

    outcomes = ranks.run(join_and_leave, range(3))
    assert [one.value for one in outcomes] == [b"value", b"value", b""], outcomes


def clean(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    prefixes = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "PYCOLL_", "OMPI_", "PMI", "SLURM_")
    for name in list(os.environ):
        if name.startswith((*prefixes, "TORCHELASTIC_", "MPI_LOCAL")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_world_of_more_ranks_than_a_communicator_has_raises_at_once(monkeypatch, port):
    for size in ("257", "300000", "3000000"):
        clean(monkeypatch, RANK="0", WORLD_SIZE=size, MASTER_PORT=str(port), PYCOLL_TOKEN=TOKEN)
        start = time.monotonic()
        with pytest.raises(errors.UsageError, match=f"1 to 256 ranks, asked for {size}"):
            init_from_environment(1)
        assert time.monotonic() - start < 1


def test_deadline_holds_with_hundreds_of_missing_ranks(ranks, port):
    outcome = ranks.outcome(ranks.start(lambda: bootstrap.join(env(0, 250, port), 0.3)))
    assert outcome.error == "TimeoutError"
    assert "ranks 1, 2, 3, " in outcome.text and ", 248, 249 of 250 did not join" in outcome.text
    outcomes = ranks.run(lambda rank: bootstrap.join(env(rank, 250, port), 0.8), [0, 61, 249])
    for outcome in outcomes:
        assert " 60, 62, " in outcome.text and ", 248 of 250 did not join" in outcome.text


def test_job_without_a_token_needs_a_loopback_address(monkeypatch, port):
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    clean(monkeypatch, **rank, MASTER_ADDR="192.0.2.1")
    started = time.monotonic()
    text = (
        rf"the ranks meet at 192\.0\.2\.1:{port}, which is not a loopback address, and "
        r"PYCOLL_TOKEN is not set, .* set PYCOLL_TOKEN to the same random text on all ranks, .*"
        r" PYCOLL_TOKEN=none"
    )
    for number in ("0", "1"):
        monkeypatch.setenv("RANK", number)
        with pytest.raises(errors.UsageError, match=text):
            init_from_environment(20)
    assert time.monotonic() - started < 5
    for name, value in {"PYCOLL_TOKEN": "none", "LOCAL_WORLD_SIZE": "2"}.items():
        clean(monkeypatch, **rank, MASTER_ADDR="192.0.2.1", **{name: value})
        with pytest.raises(errors.TimeoutError, match="rank 1 could not reach the store"):
            init_from_environment(0.2)
    clean(monkeypatch, **rank, MASTER_ADDR="192.0.2.1", LOCAL_WORLD_SIZE="2")
    assert bootstrap.read_launch_env().master_addr == "127.0.0.1"  # all ranks are here
    clean(monkeypatch, **rank, MASTER_ADDR="192.0.2.1", LOCAL_WORLD_SIZE="1")
    assert bootstrap.read_launch_env().master_addr == "192.0.2.1"


def test_random_number_of_srun_is_the_secret(monkeypatch):
    srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
    clean(monkeypatch, **srun)
    assert bootstrap.read_launch_env().local
    clean(monkeypatch, **srun, PMI_SHARED_SECRET="12345678901234567890")
    first = bootstrap.read_launch_env()
    assert not first.local and "1234567890" not in first.token and len(first.token) == 64
    clean(monkeypatch, **srun | {"SLURM_PROCID": "0"}, PMI_SHARED_SECRET="12345678901234567890")
    assert bootstrap.read_launch_env().token == first.token
    clean(monkeypatch, **srun, PMI_SHARED_SECRET="22345678901234567890")
    assert bootstrap.read_launch_env().token != first.token
    clean(monkeypatch, **srun, PMI_SHARED_SECRET="1", PYCOLL_TOKEN=TOKEN)
    assert bootstrap.read_launch_env().token == TOKEN


def test_rank_with_a_token_and_rank_zero_without_one_say_so(ranks, port):
    def join(rank: int, local: bool) -> None:
        bootstrap.join(env(rank, 2, port, local), 1)

    pids = [ranks.start(lambda: join(0, True)), ranks.start(lambda: join(1, False))]
    first, second = map(ranks.outcome, pids)
    # Rank 1 looks for a store without a token, too; then its process ends.
    assert (first.error, first.rank) in (("PeerDiedError", 1), ("TimeoutError", -1)), first
    assert second.error == "UsageError", second
    assert "rank 1 has a PYCOLL_TOKEN, and the store at 127.0.0.1" in second.text


# --- other users of this host ---


def abstract(port: int) -> str:
    return f"\0pycoll-store-{port}"


def as_other_user(fn: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        "".encode("idna")  # loaded before the process cannot read it any more
        os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
        return fn()

    return run


def try_to_join(port: int, uid: int, tries: int) -> list[str]:
    """Every way for another user to become rank 1 of the job at that port. What came of each."""
    found = set()
    for token in (f"uid {uid} ", "", "none", TOKEN):
        for local in (False, True):
            try:
                bootstrap.TcpStore("127.0.0.1", port, token, 1, 0.02, local)
                found.add("JOINED")
            except errors.Error as error:
                found.add(type(error).__name__)
    for _ in range(tries):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(5)
            with contextlib.suppress(ConnectionError):
                s.connect(abstract(port))
                s.sendall(store_client.hello(1, os.urandom(16)))
                if store_client.read_frame(s) is not None:
                    found.add("ANSWERED")
        with socket.socket() as s, contextlib.suppress(ConnectionRefusedError):
            s.connect(("127.0.0.1", port))
            found.add("CONNECTED")
    return sorted(found)


def other_user_and_job(ranks: Any, port: int, tries: int) -> tuple[list[str], list[Outcome]]:
    """Another user tries to become rank 1 of a job without a token; then rank 1 comes."""
    uid = os.getuid()
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def rank_main(rank: int) -> float:
        import numpy as np

        import pycoll

        os.environ.pop("PYCOLL_TOKEN", None)
        os.environ.update(job, RANK=str(rank))
        with pycoll.init(timeout_s=20) as comm:
            return float(comm.all_reduce(np.full(4, rank + 1.0))[0])

    first = ranks.start(lambda: rank_main(0))
    deadline = time.monotonic() + 10
    while abstract(port)[1:] not in Path("/proc/net/unix").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    intruder = ranks.outcome(ranks.start(as_other_user(lambda: try_to_join(port, uid, tries))))
    assert not intruder.error, intruder
    second = ranks.start(lambda: rank_main(1))
    return intruder.value, [ranks.outcome(first), ranks.outcome(second)]


@as_root
@pytest.mark.parametrize("tries", [5, pytest.param(500, marks=pytest.mark.slow)])
def test_another_user_of_this_host_cannot_join_a_job_without_a_token(ranks, port, tries):
    found, outcomes = other_user_and_job(ranks, port, tries)
    assert found == ["TimeoutError"]
    assert [one.text for one in outcomes] == ["", ""]
    assert [one.value for one in outcomes] == [3.0, 3.0]


@as_root
def test_another_user_that_squats_on_the_store_of_a_job_without_a_token_hears_nothing(ranks, port):
    ready, over, heard = os.pipe(), os.pipe(), []
    os.set_blocking(over[0], False)

    def squat() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.bind(abstract(port))
            s.listen()
            os.write(ready[1], b"x")
            heard = b""
            s.settimeout(0.1)
            while True:
                with contextlib.suppress(BlockingIOError):
                    os.read(over[0], 1)
                    return heard
                with contextlib.suppress(TimeoutError):
                    end, _ = s.accept()
                    with end:
                        end.settimeout(0.5)
                        heard += end.recv(1000)

    squatter = ranks.start(as_other_user(squat))
    assert os.read(ready[0], 1) == b"x"
    for rank in (1, 0):
        pid = ranks.start(lambda r=rank: bootstrap.join(env(r, 2, port, True), 0.3))
        outcome = ranks.outcome(pid)
        heard.append((outcome.error, outcome.text))
    os.write(over[1], b"x")
    assert heard[0][0] == "TimeoutError" and "a process of another user listens" in heard[0][1]
    assert heard[1][0] == "SystemError" and "Address already in use" in heard[1][1]
    assert ranks.outcome(squatter).value == b""
    for end in (*ready, *over):
        os.close(end)
