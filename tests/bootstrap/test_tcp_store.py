"""The store: its values, its clients, and its end."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pycoll import errors
from pycoll._core import bootstrap

from . import store_client

pytestmark = pytest.mark.ranks


def connect(
    server: bootstrap.TcpStoreServer, rank: int = 0, token: str = "secret", timeout_s: float = 5
) -> bootstrap.TcpStore:
    return bootstrap.TcpStore("127.0.0.1", server.port, token, rank, timeout_s)


def start_server(token: str, address: str = "127.0.0.1", port: int = 0) -> Any:
    return bootstrap.TcpStoreServer(address, port, token)


def in_thread(fn: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Starts `fn`; the list holds its result, or the exception, once the thread has ended."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(fn())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_get_after_set_returns_the_bytes(server):
    writer, reader = connect(server, 0), connect(server, 1)
    for value in (b"old", b"", b"x", bytes(range(256)), os.urandom(5_000_000)):
        writer.set("key", value)
        assert reader.get("key", 5) == value
    with pytest.raises(errors.UsageError, match="takes at most 16777216"):
        writer.set("key", b"x" * (16 << 20))
    assert reader.get("key", 5) == value


def test_get_before_set_waits_for_it(server):
    writer, readers = connect(server), [connect(server, rank) for rank in range(1, 9)]
    waiting = [in_thread(lambda store=store: store.get("late", 5)) for store in readers]
    time.sleep(0.1)
    assert all(results == [] for _, results in waiting)
    writer.set("late", b"now")
    for thread, results in waiting:
        thread.join()
        assert results == [b"now"]


def test_get_of_a_key_never_set_names_it_and_leaves_the_store_usable(server):
    store, other = connect(server, 3), connect(server, 4)
    with pytest.raises(errors.TimeoutError, match=r"rank 3 waited 0.1 s for get 'absent'"):
        store.get("absent", 0.1)
    other.set("absent", b"too late")
    other.set("present", b"yes")
    assert store.get("present", 5) == b"yes"
    assert store.get("absent", 5) == b"too late"


def test_add_from_many_ranks_counts_every_one(server):
    stores = [connect(server, rank) for rank in range(8)]
    seen: list[int] = []

    def count(store: bootstrap.TcpStore) -> None:
        seen.extend(store.add("count", 1) for _ in range(50))

    threads = [threading.Thread(target=count, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 401))
    assert stores[0].add("count", -400) == 0
    assert stores[0].get("count", 5) == b"0"


def test_add_of_zero_asks_without_setting(server):
    store = connect(server)
    assert store.add("asked", 0) == 0
    with pytest.raises(errors.TimeoutError):
        store.get("asked", 0.05)


def test_add_to_what_is_no_number_is_refused(server):
    store = connect(server)
    for value in (b"ten", b"", b"1x", b"9223372036854775807"):
        store.set("word", value)
        with pytest.raises(
            errors.UsageError, match="'word' is not a number, or the sum is too large"
        ):
            store.add("word", 1)
        assert store.get("word", 5) == value


def test_connect_before_the_server_is_there_waits_for_it(port):
    thread, results = in_thread(lambda: bootstrap.TcpStore("127.0.0.1", port, "t", 1, 10))
    time.sleep(0.3)
    server = start_server("t", port=port)
    thread.join()
    results[0].set("key", b"value")
    server.stop()


def test_connect_without_a_server_says_what_to_do(port):
    text = (
        rf"rank 3 could not reach the store at 127.0.0.1:{port} within 0.2 s "
        r"\(Connection refused\): start rank 0, or set MASTER_ADDR and MASTER_PORT"
    )
    with pytest.raises(errors.TimeoutError, match=text):
        bootstrap.TcpStore("127.0.0.1", port, "t", 3, 0.2)


def test_connect_to_another_service_says_so(port):
    with socket.create_server(("127.0.0.1", port)) as other:

        def greet() -> None:
            connection, _ = other.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            time.sleep(0.5)
            connection.close()

        thread, _ = in_thread(greet)
        with pytest.raises(errors.TimeoutError, match="not a pycoll store|did not answer"):
            bootstrap.TcpStore("127.0.0.1", port, "t", 1, 0.3)
        thread.join()


def test_connect_with_another_token_is_refused_and_disturbs_no_other(server, capfd):
    member = connect(server)
    for token in ("", "secre", "secreT", "secret ", "x" * 1024):
        with pytest.raises(
            errors.UsageError, match="refused rank 1: .* same PYCOLL_TOKEN on every"
        ):
            connect(server, 1, token)
    for start in (lambda token: connect(server, 1, token), start_server):
        with pytest.raises(errors.UsageError, match="has 1025 bytes; the maximum is 1024"):
            start("x" * 1025)
    member.set("key", b"value")
    assert connect(server, 1).get("key", 5) == b"value"
    assert capfd.readouterr() == ("", "")


def test_server_under_garbage_serves_on(server):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    noise = random.Random(seed)
    member = connect(server)
    hello = b"\x00\x01\x00\x00\x00" + store_client.text(store_client.MAGIC)
    number = os.urandom(16)
    messages = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        struct.pack("<I", 0),
        struct.pack("<I", 5) + b"\x01\x00\x00\x00\x00",
        struct.pack("<I", len(hello)) + hello,  # ends where the rank should be
        struct.pack("<I", len(hello) + 8) + hello + bytes(4) + struct.pack("<I", 0xFFFFFFFF),
        store_client.hello(1, b""),
        store_client.hello(1, number + b"x"),
        store_client.frame(store_client.PROOF, store_client.text(bytes(32))),  # before a hello
        *(struct.pack("<I", 40) + noise.randbytes(40) for _ in range(50)),
    ]
    for message in messages:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as peer:
            peer.sendall(message)
            with suppress(ConnectionResetError):
                assert peer.recv(100) == b"", message
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as peer:
        peer.sendall(store_client.hello(1, number) * 2)  # the second one in place of a proof
        assert store_client.read_frame(peer)[0] == store_client.CHALLENGE
        assert store_client.read_frame(peer) is None
    member.set("key", b"value")
    assert connect(server, 1).get("key", 5) == b"value"


def test_member_that_sends_garbage_is_cut_off_alone(server):
    member = connect(server)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as broken:
        assert store_client.join(broken, "secret", 7) == store_client.OK
        broken.sendall(struct.pack("<I", 9) + b"\x02\x02\x00\x00\x00" + struct.pack("<I", 99))
        assert broken.recv(100) == b""
    member.set("key", b"value")
    assert member.get("key", 5) == b"value"


@pytest.mark.slow
def test_store_without_room_refuses_the_rank_that_asks_and_serves_the_others(server):
    """Slow: fills 512 MiB."""
    greedy, other = connect(server, 3), connect(server, 4)
    other.set("small", b"value")
    value = bytes((16 << 20) - 1000)
    with pytest.raises(errors.UsageError, match=r"rank 3: the store has no room for 'large/\d+'"):
        for number in range(40):
            greedy.set(f"large/{number}", value)
    assert number > 28
    assert other.get("small", 5) == b"value"
    other.set("small", b"another")  # a value may be replaced
    assert greedy.get("small", 5) == b"another"
    greedy.set("large/0", b"")
    greedy.set("large/1", value)


@pytest.mark.slow
def test_session_refuses_more_processes_than_it_can_have(server):
    """Slow: a thousand connections."""
    for rank in range(1024):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as one:
            assert store_client.join(one, "secret", rank) == store_client.OK
    with pytest.raises(errors.TimeoutError, match="1024 processes have joined that session"):
        connect(server, 1024, timeout_s=0.3)


def test_server_with_hundreds_of_silent_connections_serves_on(server):
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    member = connect(server)
    member.set("key", b"value")
    assert member.get("key", 5) == b"value"
    silent[0].settimeout(5)
    assert silent[0].recv(1) == b""  # the oldest gave way
    for connection in silent:
        connection.close()


def test_server_listens_on_its_address_only(server):
    with open("/proc/net/tcp") as tcp:
        listening = [line.split()[1] for line in tcp if line.split()[3] == "0A"]
    suffix = f":{server.port:04X}"
    assert [one for one in listening if one.endswith(suffix)] == ["0100007F" + suffix]
    for address in ("0.0.0.0", "::", "::ffff:0.0.0.0"):
        with pytest.raises(errors.UsageError, match="cannot listen on every interface"):
            start_server("t", address)
    with pytest.raises(errors.SystemError, match="MASTER_ADDR must be an address of rank 0's host"):
        start_server("t", "192.0.2.1")
    with pytest.raises(errors.SystemError, match=f"127.0.0.1:{server.port}: Address already in"):
        start_server("t", port=server.port)


def test_server_on_ipv6_serves():
    try:
        server = bootstrap.TcpStoreServer("::1", 0, "t")
    except errors.SystemError:
        pytest.skip("this machine has no IPv6")
    store = bootstrap.TcpStore("::1", server.port, "t", 0, 5)
    store.set("key", b"value")
    assert store.get("key", 5) == b"value"
    server.stop()


def test_server_restarted_on_its_port_takes_over(port):
    for _ in range(5):
        server = start_server("t", port=port)
        store = bootstrap.TcpStore("127.0.0.1", port, "t", 0, 5)
        assert store.add("fresh", 1) == 1
        server.stop()  # before its client has left: the port stays in TIME_WAIT


def test_second_join_of_a_rank_waits_for_the_next_session(port):
    old = start_server("t", port=port)
    first = bootstrap.TcpStore("127.0.0.1", port, "t", 1, 5)
    first.set("session", b"old")
    with pytest.raises(errors.TimeoutError, match="rank 1 has already joined that session"):
        bootstrap.TcpStore("127.0.0.1", port, "t", 1, 0.2)
    thread, results = in_thread(lambda: bootstrap.TcpStore("127.0.0.1", port, "t", 1, 10))
    time.sleep(0.2)
    old.stop()
    new = start_server("t", port=port)
    thread.join()
    results[0].set("session", b"new")
    assert results[0].get("session", 5) == b"new"
    new.stop()


def test_get_when_the_server_process_is_killed_raises_at_once(ranks, port):
    def serve() -> None:
        server = start_server("t", port=port)
        time.sleep(60)
        server.stop()

    pid = ranks.start(serve)
    store = bootstrap.TcpStore("127.0.0.1", port, "t", 1, 10)
    thread, results = in_thread(lambda: store.get("never", 30))
    time.sleep(0.1)
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert time.monotonic() - killed_at < 10
    assert isinstance(results[0], errors.PeerDiedError)
    assert results[0].rank == 0
    assert "get 'never'" in str(results[0])
    with pytest.raises(errors.PeerDiedError):
        store.set("key", b"value")


def test_stop_while_a_get_waits_raises_in_it_and_does_not_hang(server):
    store = connect(server, 1)
    thread, results = in_thread(lambda: store.get("never", 30))
    time.sleep(0.1)
    start = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - start < 10
    thread.join()
    assert isinstance(results[0], errors.PeerDiedError)


def test_stop_with_linger_serves_until_all_have_left(server):
    store = connect(server, 1)
    store.set("key", b"value")
    thread, _ = in_thread(lambda: server.stop(30))
    time.sleep(0.1)
    assert store.get("key", 5) == b"value"
    with pytest.raises(errors.TimeoutError):
        connect(server, 2, timeout_s=0.2)
    assert thread.is_alive()
    del store
    thread.join(5)
    assert not thread.is_alive()


def test_stop_with_linger_ends_although_a_client_stays(server):
    store = connect(server, 1)
    start = time.monotonic()
    server.stop(0.3)
    assert 0.3 <= time.monotonic() - start < 10
    with pytest.raises(errors.PeerDiedError):
        store.get("key", 5)


def test_after_a_death_what_was_set_is_found_and_nothing_more_can_be_set():
    """So a key that rank 0 sets last is found by all ranks or by none."""
    server = bootstrap.TcpStoreServer("127.0.0.1", 0, "secret", reports_deaths=True)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        first, second = (
            stack.enter_context(contextlib.closing(connect(server, rank))) for rank in range(2)
        )
        first.set("before", "x")
        second.report_death(2, "rank 2 ended")
        assert second.get("before", 10) == b"x"
        for act in (lambda: first.set("after", "y"), lambda: second.get("after", 10)):
            with pytest.raises(errors.PeerDiedError, match="rank 2 ended") as raised:
                act()
            assert raised.value.rank == 2


def test_ctrl_c_ends_a_get(ranks, server):
    def wait() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store = connect(server, 1)
        store.set("waiting", b"")
        store.get("never", 30)

    pid = ranks.start(wait)
    connect(server, 0).get("waiting", 10)
    time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    outcome = ranks.outcome(pid)
    assert outcome.error == "KeyboardInterrupt"
    assert outcome.seconds < 20
    assert outcome.num_fds_leaked == 0


def test_failure_of_the_servers_thread_is_told_to_all_ranks(server):
    """A poll of more descriptors than the limit allows fails, as one without memory does."""
    clients = [connect(server, rank) for rank in range(2)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "rank 0: the thread of the store server failed: poll: Invalid argument"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        for rank, client in enumerate(clients):
            with pytest.raises(errors.SystemError, match=f"rank {rank}: get 'missing': {text}"):
                client.get("missing", 5)
            with pytest.raises(errors.PeerDiedError, match="is gone"):
                client.get("missing", 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    server.stop()
