"""Encrypted connections: secrets stay hidden, and ranks with other settings raise."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pycoll import errors
from pycoll._core import bootstrap

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(30)]

TOKEN = "a token that is never guessed"
VALUE = b"a value that is not readable " * 40_000


@contextlib.contextmanager
def tls(on: bool) -> Iterator[None]:
    """Makes servers and clients with PYCOLL_TLS=1, or without."""
    os.environ["PYCOLL_TLS"] = str(int(on))
    try:
        yield
    finally:
        del os.environ["PYCOLL_TLS"]


@contextlib.contextmanager
def serving(on: bool, token: str = TOKEN) -> Iterator[bootstrap.TcpStoreServer]:
    with tls(on):
        server = bootstrap.TcpStoreServer("127.0.0.1", 0, token)
    try:
        yield server
    finally:
        server.stop()


class Relay:
    """A relay in the middle of a connection: records the bytes, and may change one of them."""

    def __init__(self, port: int, flip_at: int = -1) -> None:
        self.seen = bytearray()
        self._to, self._flip_at = port, flip_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._to))
        with near, far, selectors.DefaultSelector() as selector:
            other = {near: far, far: near}
            for end in other:
                selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    with contextlib.suppress(ConnectionError):
                        if data := bytearray(end.recv(1 << 16)):
                            at = self._flip_at - len(self.seen)
                            self.seen += data
                            if 0 <= at < len(data):
                                data[at] ^= 1
                            other[end].sendall(data)
                            continue
                    return

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize("on", [False, True])
def test_values_are_visible_on_the_wire_only_without_tls_and_the_token_never(on):
    with serving(on) as server:
        relay = Relay(server.port)
        with tls(on):
            store = bootstrap.TcpStore("127.0.0.1", relay.port, TOKEN, 1, 5)
        store.set("key", VALUE)
        assert store.get("key", 5) == VALUE
        assert store.add("number", 3) == 3
        del store
        relay.close()
    assert len(relay.seen) > 2 * len(VALUE)
    assert TOKEN.encode() not in relay.seen
    assert (VALUE[:29] in relay.seen) != on


def test_changed_byte_ends_the_connection():
    with serving(True) as server:
        relay = Relay(server.port, flip_at=100_000)
        with tls(True):
            store = bootstrap.TcpStore("127.0.0.1", relay.port, TOKEN, 1, 5)
        with pytest.raises(errors.PeerDiedError):
            store.set("key", VALUE)
        del store
        relay.close()


def test_ranks_that_do_not_agree_about_tls_raise_at_once():
    for there, text in [
        (True, r"the store at .* wants TLS, and rank 1 does not: set PYCOLL_TLS"),
        (False, r"rank 1 wants TLS, and the store at .* does not: set PYCOLL_TLS"),
    ]:
        for length in (20, 759):
            token = "x" * length
            start = time.monotonic()
            with (
                serving(there, token) as server,
                tls(not there),
                pytest.raises(errors.UsageError, match=text),
            ):
                bootstrap.TcpStore("127.0.0.1", server.port, token, 1, 20)
            assert time.monotonic() - start < 10


def test_wrong_token_is_refused_at_once_and_not_shown():
    with serving(True) as server:
        relay = Relay(server.port)
        with tls(True), pytest.raises(errors.UsageError, match="refused rank 1: .* PYCOLL_TOKEN"):
            bootstrap.TcpStore("127.0.0.1", relay.port, "another that is never guessed", 1, 20)
        relay.close()
        assert b"is never guessed" not in relay.seen
        with tls(True):  # it serves on
            bootstrap.TcpStore("127.0.0.1", server.port, TOKEN, 1, 5).set("key", "value")


@pytest.mark.skipif(not shutil.which("openssl"), reason="certificates are made by openssl")
def test_server_with_a_certificate_but_no_token_learns_nothing(tmp_path):
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=rank0"
    subprocess.run(
        ["openssl", *words.split(), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    heard: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            with end, contextlib.suppress(OSError), context.wrap_socket(end, True) as wrapped:
                heard.append(wrapped.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with tls(True), pytest.raises(errors.TimeoutError, match="did not prove with TLS"):
            bootstrap.TcpStore("127.0.0.1", listener.getsockname()[1], TOKEN, 1, 0.3)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert not any(heard)


def test_unauthenticated_peers_are_cut_off_and_do_no_harm():
    with serving(True) as server:
        kept = []
        # Among them starts of long hellos, whose rest the server waits for.
        for first in (b"\x16", b"\x16\x03\x01\x02\x00\x01\x00", b"\xa0\x00\x01", b"p", b""):
            for _ in range(40):  # more than there is room for
                kept.append(socket.create_connection(("127.0.0.1", server.port)))
                kept[-1].sendall(first)
        for seed in range(20):  # chosen ones: one of 1,400 random texts begins as a long hello
            noise = socket.create_connection(("127.0.0.1", server.port))
            with noise, contextlib.suppress(ConnectionError):
                noise.sendall(random.Random(seed).randbytes(5000))
                noise.settimeout(2)
                assert len(noise.recv(1000)) <= 14  # alerts, and an end
        start = time.thread_time()
        cpu = time.process_time()
        with tls(True):
            store = bootstrap.TcpStore("127.0.0.1", server.port, TOKEN, 1, 5)
        store.set("key", "value")
        time.sleep(0.2)
        assert time.process_time() - cpu < 0.15 + time.thread_time() - start  # no thread spins
        for one in kept:
            one.close()


def test_settings_that_protect_nothing_are_refused(monkeypatch):
    for name in ("PYCOLL_TOKEN", "PYCOLL_TLS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for name, value, text in [
        ("PYCOLL_TLS", "yes", "PYCOLL_TLS=yes: expected 0 or 1"),
        ("PYCOLL_TLS", "1", "not set: set it to at least 16 random characters"),
        ("PYCOLL_TOKEN", "secret", "PYCOLL_TOKEN has 6 characters"),
    ]:
        monkeypatch.setenv(name, value)
        with pytest.raises(errors.UsageError, match=text):
            bootstrap.read_launch_env()


def test_missing_library_is_one_sentence():
    code = (
        "from pycoll._core import bootstrap\n"
        "try: bootstrap.TcpStoreServer('127.0.0.1', 0, 'x' * 16)\n"
        "except OSError as error: print(error)"
    )
    env = os.environ | {"PYCOLL_TLS": "1", "PYCOLL_OPENSSL": "/nowhere/libssl.so.3"}
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    assert said.startswith("PYCOLL_TLS=1 needs OpenSSL 3, but /nowhere/libssl.so.3: cannot open")
    assert "install the system's libssl3, or set the path of the library in PYCOLL_OPENSSL" in said
    assert len(said.splitlines()) == 1
