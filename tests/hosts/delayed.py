"""Hosts whose packets take their time: a process carries them from TUN device to TUN device.

netem, which does that in a kernel, is not in every kernel. Each packet is held for the delay, and
for as long as its port is busy with those before it. A packet is up to 64 KiB, as the kernel hands
it to a card that cuts it (TSO): so a process of Python carries some Gbit/s.
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
TUNSETIFF, IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x400454CA, 0x0001, 0x1000, 0x4000
TUNSETOFFLOAD, TUN_F_CSUM, TUN_F_TSO4 = 0x400454D0, 0x01, 0x02
MTU = 9000
VNET_HEADER = 10  # before each packet: how it is to be cut, and that its checksum is to be made


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
                # A carrier that waits for a core is a slower net.
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
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
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def _carry(devices: list[int], settings: mmap.mmap) -> None:
    """Reads packets of IPv4 and writes each to the host of its address, in the order of arrival."""
    numbers = {device: host for host, device in enumerate(devices)}
    sent_at = [0.0] * len(devices)  # until then the port sends what it has
    received_at = [0.0] * len(devices)
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # lost, as in a full queue
                os.write(devices[to], packet)
        wait_s = max(waiting[0][0] - now, 0) if waiting else None
        ready, _, _ = select.select(devices, [], [], wait_s)
        delay_s, bytes_per_s = struct.unpack("dd", settings[0:16])
        now = time.monotonic()
        for device in ready:
            sender = numbers[device]
            for _ in range(64):
                try:
                    packet = os.read(device, VNET_HEADER + (64 << 10))
                except BlockingIOError:
                    break
                version, to = packet[VNET_HEADER] >> 4, packet[VNET_HEADER + 19] - 1
                if version != 4 or not 0 <= to < len(devices):
                    continue
                arrives = now
                if bytes_per_s:
                    busy_s = (len(packet) - VNET_HEADER) / bytes_per_s
                    sent_at[sender] = max(now, sent_at[sender]) + busy_s
                    # What comes from several hosts at once waits at the receiver's port.
                    received_at[to] = max(sent_at[sender], received_at[to] + busy_s)
                    arrives = received_at[to]
                number += 1
                heapq.heappush(waiting, (arrives + delay_s, number, to, packet))
