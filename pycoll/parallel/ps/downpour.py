"""Downpour SGD: replicas step on their own between rare pulls and pushes."""

from __future__ import annotations

import time

import torch
from torch import optim

from pycoll.errors import TimeoutError, UsageError
from pycoll.parallel.ps.worker import Worker

_POLL_S = 0.01


class Downpour:
    """Steps a worker's copy of the weights, pushes sums of gradients, and pulls now and then.

    With `nfetch=1, npush=1` and one worker it is plain SGD, to the bits. Rows of sparse tables are
    pulled when they are looked up, and their gradients go with the next push.

    Args:
        worker: A worker of the mode "async" or "ssp", with the model registered.
        local: Optimizer of the worker's copy of the registered weights; the servers have one of
            their own, in the paper Adagrad.
        nfetch: Steps between two pulls.
        npush: Steps between two pushes.
        warm_start: Steps that worker 0 makes before the other workers begin.
        timeout_s: Longest wait of the others for them, seconds.

    Raises:
        UsageError: A number of steps is not positive, or the mode gathers gradients.

    Source: Dean et al. 2012, "Large Scale Distributed Deep Networks", NeurIPS.
    """

    def __init__(
        self,
        worker: Worker,
        local: optim.Optimizer,
        *,
        nfetch: int = 1,
        npush: int = 1,
        warm_start: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        if nfetch < 1 or npush < 1 or warm_start < 0:
            raise UsageError(
                f"Downpour: nfetch={nfetch}, npush={npush}, warm_start={warm_start}: expected at "
                "least 1, 1 and 0 steps"
            )
        if worker.gathers:
            raise UsageError("Downpour: expected a worker of mode='async' or mode='ssp'")
        self._worker, self._local = worker, local
        self._nfetch, self._npush = nfetch, npush
        self._parameters = [p for group in local.param_groups for p in group["params"]]
        self._sums = [torch.zeros_like(p) for p in self._parameters]
        self._num_steps = 0
        if worker.number:
            self._wait_for_first(warm_start, timeout_s)
        worker.pull()

    @torch.no_grad()
    def step(self) -> None:
        """Steps by the gradients of a backward pass, and clears them."""
        worker = self._worker
        self._num_steps += 1
        for p, total in zip(self._parameters, self._sums, strict=True):
            if p.grad is not None:
                total += p.grad
        self._local.step()
        self._local.zero_grad()
        if self._num_steps % self._npush == 0:
            self._push()
        worker.clock()
        if self._num_steps % self._nfetch == 0:
            worker.pull()

    def finish(self) -> None:
        """Pushes what is left, and pulls."""
        if self._num_steps % self._npush:
            with torch.no_grad():
                self._push()
        self._worker.pull()

    def _push(self) -> None:
        for p, total in zip(self._parameters, self._sums, strict=True):
            p.grad = total.clone()
            total.zero_()
        self._worker.push()

    def _wait_for_first(self, num_steps: int, timeout_s: float) -> None:
        """Waits until worker 0 has made steps, or has left."""
        end_s = time.monotonic() + timeout_s
        while self._worker.report().clocks.get(0, num_steps) < num_steps:
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"Downpour: worker {self._worker.number} waited {timeout_s:g} s for "
                    f"{num_steps} steps of worker 0"
                )
            time.sleep(_POLL_S)


__all__ = ["Downpour"]
