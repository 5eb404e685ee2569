"""A device that is slower than this machine: arithmetic runs here, and takes its time.

A sleeping rank uses no core, so more ranks than cores keep their pace. As with a GPU, the rank's
Python code runs ahead of the device, and waits for it where it communicates.
"""

from __future__ import annotations

import time
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pycoll.parallel.core.devices import HostClock
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.planner.operators import counter_of

_AHEAD_S = 0.1  # a rank runs ahead of its device by at most this time


class Paced(TorchDispatchMode):
    """Within it, operators of this thread take the time of a device: operations over its rate.

    Memory traffic and the start of operators take no time on the device. Make it before
    `parallelize`, which looks up the clock of the mesh.

    Args:
        flops_per_s: Operations per second of the device, fewer than this machine's.
        mesh: The mesh whose collectives and messages wait for the device.

    Cost: some ten microseconds of processor time for each operator.
    """

    def __init__(self, flops_per_s: float, mesh: Mesh) -> None:
        super().__init__()
        self.flops_per_s = flops_per_s
        self._free_s = 0.0  # when the device has done all that it was given
        mesh.ledger.clock = _PacedClock(self)

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)
        self.finish()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = counter_of(func)
        if count is not None:
            now_s = time.perf_counter()
            flops = count(*args, **kwargs, out_val=result)
            self._free_s = max(self._free_s, now_s) + flops / self.flops_per_s
            if self._free_s - now_s > _AHEAD_S:
                time.sleep(self._free_s - now_s - _AHEAD_S / 2)
        return result

    def finish(self) -> None:
        """Waits until the device has done all that it was given."""
        left_s = self._free_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _PacedClock(HostClock):
    """Marks a point behind the work of the device."""

    def __init__(self, device: Paced) -> None:
        self._device = device

    def now(self) -> int:
        self._device.finish()
        return super().now()


__all__ = ["Paced"]
