"""Hosts whose packets take their time: the kernel holds them, and a program lets them go.

netem, which does that alone, is not in every kernel; NFQUEUE is in most. What comes to a host waits
there for the delay, behind the queues of both ends of its link. A packet is up to 64 KiB, as the
kernel hands it to a card that cuts it (TSO).
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
from namespaces import NAMESPACES, Network


@functools.cache
def why_not_delayed() -> str:
    """Why this machine cannot delay packets; empty when it can."""
    try:
        DelayedNetwork(1, name=f"pyc{os.getpid()}w").close()
    except CannotDelay as reason:
        return str(reason)
    return ""


class CannotDelay(Exception):
    """A line of text."""


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
        super()._connect()
        settings = os.memfd_create("settings")
        os.ftruncate(settings, 8)
        self._settings = mmap.mmap(settings, 8)  # shared with the carrier
        self.set_delay(0.0)
        spaces = [str(NAMESPACES / self.namespace(host)) for host in range(self.n)]
        carrier = subprocess.Popen(
            [Path(build().name) / "carrier", str(settings), *spaces],
            pass_fds=(settings,),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(settings)
        assert carrier.stdout is not None
        if (line := carrier.stdout.readline().strip()) != "ready":
            carrier.communicate()
            raise CannotDelay(line)
        self._carrier = carrier

    def set_delay(self, delay_s: float) -> None:
        self._settings[0:8] = struct.pack("d", delay_s)

    def close(self) -> None:
        super().close()
        if carrier := getattr(self, "_carrier", None):
            ended = carrier.poll() is not None
            carrier.kill()
            text = carrier.communicate()[0].strip()
            assert not ended, f"packets were lost: {text or carrier.returncode}"


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
