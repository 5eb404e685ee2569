"""Hosts whose packets take their time: a process carries them from TUN device to TUN device.

netem, which does that in a kernel, is not in every kernel. Each packet is held for the delay, and
for as long as its port is busy with those before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import mmap
import os
import select
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from namespaces import CLONE_NEWNET, NAMESPACES, Network, ip

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000


def why_not_delayed() -> str:
    return "" if os.access(TUN, os.R_OK | os.W_OK) else f"delay needs {TUN}"


@dataclass
class DelayedNetwork(Network):
    """As Network, with `set_delay` of one way and `set_bandwidth` of each host's port."""

    def _connect(self) -> None:
        self._settings = mmap.mmap(-1, 16)  # shared with the carrier: seconds, bytes per second
        self.set_delay(0.0)
        self.set_bandwidth(0.0)
        ready, told = os.pipe()
        self._carrier = os.fork()
        if self._carrier == 0:
            try:
                os.close(ready)
                devices = [_open_tun(self.namespace(host)) for host in range(self.n)]
                os.close(told)
                _carry(devices, self._settings)
            finally:
                os._exit(1)
        os.close(told)
        os.read(ready, 1)  # until it closes its end
        os.close(ready)
        for host in range(self.n):
            ip("-n", self.namespace(host), "link", "set", "eth0", "mtu", str(MTU),
               "txqueuelen", "20000")  # fmt: skip

    def set_delay(self, delay_s: float) -> None:
        self._settings[0:8] = struct.pack("d", delay_s)

    def set_bandwidth(self, bytes_per_s: float) -> None:
        """0: as fast as the carrier can."""
        self._settings[8:16] = struct.pack("d", bytes_per_s)

    def close(self) -> None:
        super().close()
        if carrier := getattr(self, "_carrier", 0):
            self._carrier = 0
            os.kill(carrier, signal.SIGKILL)
            os.waitpid(carrier, 0)


def _open_tun(namespace: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(NAMESPACES / namespace, os.O_RDONLY)
    if libc.setns(space, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(space)
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
    return device


def _carry(devices: list[int], settings: mmap.mmap) -> None:
    """Reads packets of IPv4 and writes each to the host of its address, in the order of arrival."""
    poll = select.epoll()
    for device in devices:
        poll.register(device, select.EPOLLIN)
    free_at = [0.0] * (2 * len(devices))  # when each port can send and can receive the next
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # lost, as in a full queue
                os.write(devices[to], packet)
        wait_s = max(waiting[0][0] - now, 0) if waiting else 1.0
        # epoll counts in milliseconds: look again at once for what is due sooner.
        ready = poll.poll(wait_s if wait_s > 2e-3 else 0)
        delay_s, bytes_per_s = struct.unpack("dd", settings[0:16])
        now = time.monotonic()
        for device, _ in ready:
            sender = devices.index(device)
            for _ in range(64):
                try:
                    packet = os.read(device, MTU + 100)
                except BlockingIOError:
                    break
                to = packet[19] - 1 if packet[0] >> 4 == 4 else -1
                if not 0 <= to < len(devices):
                    continue
                arrives = now
                if bytes_per_s:
                    busy_s = len(packet) / bytes_per_s
                    sent = max(now, free_at[2 * sender]) + busy_s
                    free_at[2 * sender] = sent
                    # What comes from several hosts at once waits at the receiver's port.
                    arrives = max(sent, free_at[2 * to + 1] + busy_s)
                    free_at[2 * to + 1] = arrives
                number += 1
                heapq.heappush(waiting, (arrives + delay_s, number, to, packet))
