"""The end of a process as its pidfd shows it, and the id of a host."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time

import pytest

from pycoll._core import bootstrap

pytestmark = pytest.mark.ranks

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1]


class Child:
    """A process that sleeps, or exits with a code."""

    def __init__(self, exit_code: int | None = None) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            if exit_code is None:
                time.sleep(60)
            os._exit(exit_code or 0)
        self.pidfd = os.pidfd_open(self.pid)

    def wait_until_ended(self) -> None:
        deadline = time.monotonic() + 10
        while not bootstrap.process_ended(self.pidfd):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def reap(self) -> None:
        os.waitpid(self.pid, 0)


def test_running_process_has_not_ended():
    child = Child()
    assert not bootstrap.process_ended(child.pidfd)
    assert bootstrap.exit_signal(child.pidfd) == 0
    os.kill(child.pid, signal.SIGKILL)
    child.reap()
    os.close(child.pidfd)


def test_signal_of_a_killed_process_is_known_before_and_after_it_is_reaped(ranks):
    """After, to another holder of its pidfd, too, where the kernel keeps it."""
    for number in SIGNALS:
        child = Child()
        told, tell = os.pipe()

        def read_signal(child=child, told=told) -> int:
            os.read(told, 1)  # reaped
            assert bootstrap.process_ended(child.pidfd)
            return bootstrap.exit_signal(child.pidfd)

        holder = ranks.start(read_signal)
        os.kill(child.pid, number)
        child.wait_until_ended()
        assert bootstrap.exit_signal(child.pidfd) == number
        child.reap()
        assert bootstrap.process_ended(child.pidfd)
        os.write(tell, b"x")
        expected = number if KERNEL >= (6, 15) else 0
        assert ranks.outcome(holder).value == expected
        assert bootstrap.exit_signal(child.pidfd) == expected
        for fd in (told, tell, child.pidfd):
            os.close(fd)


def test_process_that_exits_by_itself_has_no_signal():
    for exit_code in (0, 3, 137):
        child = Child(exit_code)
        child.wait_until_ended()
        assert bootstrap.exit_signal(child.pidfd) == 0
        child.reap()
        assert bootstrap.exit_signal(child.pidfd) == 0
        os.close(child.pidfd)


def test_exit_signal_of_another_descriptor_is_unknown():
    with open("/dev/null") as other:
        assert bootstrap.exit_signal(other.fileno()) == 0
    assert bootstrap.exit_signal(-1) == 0


def test_host_id_is_the_same_in_every_process_of_a_host(ranks):
    outcomes = ranks.run(lambda rank: bootstrap.host_id(), range(3))
    assert {outcome.value for outcome in outcomes} == {bootstrap.host_id()}
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        assert bootstrap.host_id().startswith(boot_id.read().strip())


@pytest.mark.hosts
def test_host_id_differs_in_another_network_namespace(ranks):
    clone_newnet = 0x40000000

    def enter_namespace() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(clone_newnet) != 0:
            raise PermissionError(ctypes.get_errno())
        return bootstrap.host_id()

    outcome = ranks.outcome(ranks.start(enter_namespace))
    if outcome.error == "PermissionError":
        pytest.skip("cannot make a network namespace here")
    assert outcome.value != bootstrap.host_id()
