"""Hosts whose packets take their time: a program carries them from TUN device to TUN device.

netem, which does that in a kernel, is not in every kernel. Each packet is held for the delay, and
for as long as its receiver's port is busy with those before it. The sender's port is the kernel's
queue, as elsewhere: TCP looks at how full it is. A packet is up to 64 KiB, as the kernel hands it
to a card that cuts it (TSO).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespaces import NAMESPACES, Network, ip

TUN = Path("/dev/net/tun")
MTU = 9000


def why_not_delayed() -> str:
    return "" if os.access(TUN, os.R_OK | os.W_OK) else f"delay needs {TUN}"


@functools.cache
def build() -> tempfile.TemporaryDirectory[str]:
    """The folder that `carrier` is in: a second, once for each run of the tests."""
    folder = tempfile.TemporaryDirectory(prefix="carrier_of_hosts")
    source = Path(__file__).with_name("carrier.cc")
    program = Path(folder.name) / "carrier"
    subprocess.run(["g++", "-std=c++20", "-O2", "-Wall", source, "-o", program], check=True)
    return folder


@dataclass
class DelayedNetwork(Network):
    """As Network, with `set_delay` of one way."""

    def _connect(self) -> None:
        settings = os.memfd_create("settings")
        os.ftruncate(settings, 16)
        self._settings = mmap.mmap(settings, 16)  # shared with the carrier
        self.set_delay(0.0)
        spaces = [str(NAMESPACES / self.namespace(host)) for host in range(self.n)]
        self._carrier = subprocess.Popen(
            [Path(build().name) / "carrier", str(settings), *spaces],
            pass_fds=(settings,),
            stdout=subprocess.PIPE,
        )
        os.close(settings)
        assert self._carrier.stdout is not None
        with self._carrier.stdout as told:
            assert told.readline() == b"ready\n"
        for host in range(self.n):
            ip("-n", self.namespace(host), "link", "set", "eth0", "mtu", str(MTU),
               "txqueuelen", "20000")  # fmt: skip

    def set_delay(self, delay_s: float) -> None:
        self._settings[0:8] = struct.pack("d", delay_s)

    def set_rate(self, rate: str | None, burst: str = "256kb") -> None:
        super().set_rate(rate, burst)
        bits_per_s = 0.0 if rate is None else float(rate.removesuffix("gbit")) * 1e9
        self._settings[8:16] = struct.pack("d", bits_per_s / 8)

    def _queues(self, host: int) -> list[tuple[str, str]]:
        return [(self.namespace(host), "eth0")]

    def close(self) -> None:
        super().close()
        if carrier := getattr(self, "_carrier", None):
            carrier.kill()
            carrier.wait()


@contextlib.contextmanager
def throttled(num_hosts: int, delay_s: float) -> Iterator[Network]:
    """Hosts at 1 Gbit/s whose packets take so long. Skips the test where that is impossible."""
    if delay_s and (why := why_not_delayed()):
        pytest.skip(why)
    name = f"pyc{os.getpid()}{'d' if delay_s else 'm'}"
    with contextlib.closing((DelayedNetwork if delay_s else Network)(num_hosts, name)) as network:
        if isinstance(network, DelayedNetwork):
            network.set_delay(delay_s)
        network.set_rate("1gbit")
        yield network
