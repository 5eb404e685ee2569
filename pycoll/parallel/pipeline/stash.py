"""Versions of weights: a backward uses the weights of its forward, whatever updates lie between."""

from __future__ import annotations

import torch

Version = dict[str, torch.Tensor]


class Stash:
    """The weights of one stage, in the versions that its microbatches in flight use.

    A version lives as long as a microbatch uses it, so there are at most as many versions as
    microbatches in flight.

    Source: PipeDream, SOSP 2019, section 3.3 (weight stashing, without vertical sync).
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._current: Version | None = None
        self._used: dict[int, tuple[int, Version]] = {}  # by microbatch
        self.num_updates = 0
        self.peak_versions = 0

    def forward(self, microbatch: int) -> Version:
        """Returns the current weights for a new microbatch."""
        if self._current is None:
            self._current = {
                name: parameter.detach().clone().requires_grad_()
                for name, parameter in self._parameters.items()
            }
        self._used[microbatch] = (self.num_updates, self._current)
        self.peak_versions = max(self.peak_versions, len({n for n, _ in self._used.values()}))
        return self._current

    def backward(self, microbatch: int) -> int:
        """Adds the gradients of a microbatch from its version to `.grad`.

        Returns:
            The staleness: the number of updates since the forward.
        """
        number, version = self._used.pop(microbatch)
        for name, parameter in self._parameters.items():
            gradient = version[name].grad
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient.detach()
            version[name].grad = None
        return self.num_updates - number

    def updated(self) -> None:
        """Starts a new version, after the weights have changed."""
        self._current = None
        self.num_updates += 1


__all__ = ["Stash"]
