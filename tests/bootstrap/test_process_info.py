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


def start_child(exit_code: int | None) -> tuple[int, int]:
    """A process that exits with the code, or sleeps: its pid and pidfd."""
    pid = os.fork()
    if pid == 0:
        if exit_code is None:
            time.sleep(60)
        os._exit(exit_code or 0)
    return pid, os.pidfd_open(pid)


def wait_until_ended(pidfd: int) -> None:
    deadline = time.monotonic() + 30
    while not bootstrap.process_ended(pidfd):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT])
def test_signal_of_a_killed_process_is_known_before_and_after_it_is_reaped(ranks, number):
    """Where the kernel keeps it, also to another holder of the pidfd."""
    pid, pidfd = start_child(None)
    assert not bootstrap.process_ended(pidfd)
    assert bootstrap.exit_signal(pidfd) == 0
    told, tell = os.pipe()

    def read_signal() -> int:
        os.read(told, 1)  # reaped
        assert bootstrap.process_ended(pidfd)
        return bootstrap.exit_signal(pidfd)

    holder = ranks.start(read_signal)
    os.kill(pid, number)
    wait_until_ended(pidfd)
    assert bootstrap.exit_signal(pidfd) == number
    os.waitpid(pid, 0)
    os.write(tell, b"x")
    expected = number if KERNEL >= (6, 15) else 0
    assert ranks.outcome(holder).value == expected
    assert bootstrap.exit_signal(pidfd) == expected
    for fd in (told, tell, pidfd):
        os.close(fd)


def test_process_that_exits_and_another_descriptor_have_no_signal():
    for exit_code in (0, 3, 137):
        pid, pidfd = start_child(exit_code)
        wait_until_ended(pidfd)
        assert bootstrap.exit_signal(pidfd) == 0
        os.waitpid(pid, 0)
        assert bootstrap.exit_signal(pidfd) == 0
        os.close(pidfd)
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
