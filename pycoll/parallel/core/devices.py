"""Where the tensors of a mesh are, and clocks that read the time at a point of a rank's work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from pycoll import _core
from pycoll.errors import UsageError
from pycoll.parallel.core.object_collectives import gather_objects

if TYPE_CHECKING:
    import torch

    from pycoll.communicator import Communicator

CPU = "cpu"


def agreed_device(device: Any, comm: Communicator) -> str:
    """The name of this rank's device, such as "cuda:1"; all ranks have devices of one kind.

    It becomes torch's current device. Collective.

    Args:
        device: A device of torch or its name; without a number, the ranks of a host take its
            devices in turn. None: the CPU.
        comm: The ranks.

    Raises:
        UsageError: The ranks have different kinds of devices, or a rank has no such device.

    Cost: an all_gather.
    """
    name, problem = CPU, ""
    try:
        name = CPU if device is None else _own_device(device, comm.host_rank)
    except UsageError as error:
        problem = str(error)
    every = gather_objects([name.partition(":")[0], problem], comm)
    for rank, (_, text) in enumerate(every):
        if text:
            raise UsageError(f"mesh: {text} (on rank {rank})")
    for rank, (kind, _) in enumerate(every):
        if kind != every[0][0]:
            raise UsageError(
                f"mesh: the tensors of rank 0 are on {every[0][0]!r}, those of rank {rank} on "
                f"{kind!r}: give all ranks the same device="
            )
    if name != CPU:
        import torch

        torch.get_device_module(name).set_device(torch.device(name))
    return name


def _own_device(device: Any, host_rank: int) -> str:
    import torch

    try:
        found = torch.device(device)
        if found.type == CPU:
            return CPU
        num_devices = torch.get_device_module(found.type).device_count()
    except (RuntimeError, TypeError, AttributeError):
        raise UsageError(f"device is {device!r}, expected 'cpu' or 'cuda'") from None
    library = _core.device_info()
    known = library.get("kind")
    kind = "cuda" if known == "cuda" else torch._C._get_privateuse1_backend_name()
    if known is None:
        raise UsageError(f"device={device!r} needs pycoll's device library: {library['library']}")
    if found.type != kind:
        raise UsageError(f"device is {device!r}, but pycoll's device library is for {kind!r}")
    index = host_rank % max(num_devices, 1) if found.index is None else found.index
    if index >= num_devices:
        raise UsageError(f"device is {device!r}, but torch finds {num_devices} of this kind")
    return f"{found.type}:{index}"


def settle(device: torch.device) -> None:
    """Waits for the work on the current stream of a device: other threads use other streams."""
    import torch

    if device.type != CPU:
        torch.get_device_module(device).current_stream(device).synchronize()


class Clock(Protocol):
    """Reads the time at points of a rank's work."""

    def now(self) -> Any:
        """Marks this point of the work."""

    def ns(self, mark: Any) -> int:
        """The time of a mark on CLOCK_MONOTONIC, in nanoseconds; waits until it is reached."""


class HostClock:
    """The work of the calling thread: a mark is its time."""

    def now(self) -> int:
        """Marks this point of the work."""
        return time.monotonic_ns()

    def ns(self, mark: int) -> int:
        """The mark itself."""
        return mark


class DeviceClock:
    """The work queued on the current stream of a device: a mark is an event."""

    def __init__(self, device: str) -> None:
        self._kind = device.partition(":")[0]
        self._base = self.now()
        self._base.synchronize()
        self._base_ns = time.monotonic_ns()

    def now(self) -> Any:
        """Records an event."""
        import torch

        event = torch.Event(self._kind, enable_timing=True)
        event.record()
        return event

    def ns(self, mark: Any) -> int:
        """Waits for the event; a number is a time already."""
        if isinstance(mark, int):
            return mark
        mark.synchronize()
        since_base_ns = int(self._base.elapsed_time(mark) * 1e6)
        if since_base_ns > 0:  # elapsed times are short floats, so the base follows
            self._base, self._base_ns = mark, self._base_ns + since_base_ns
            return self._base_ns
        return self._base_ns + since_base_ns


def clock_of(device: str) -> Clock:
    """The clock of a rank whose tensors are on `device`."""
    return HostClock() if device == CPU else DeviceClock(device)


__all__ = ["CPU", "Clock", "DeviceClock", "HostClock", "agreed_device", "clock_of", "settle"]
