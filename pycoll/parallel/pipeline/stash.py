"""Versions of weights: a backward uses the weights of its forward, whatever updates lie between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

Version = dict[str, torch.Tensor]


class Stash:
    """The weights of one stage, in the versions that microbatches still need.

    A version has the number of the updates in it. It is kept until its last microbatch is done.

    Source: PipeDream, SOSP 2019, section 3.3 (weight stashing and vertical sync).
    """

    def __init__(
        self, parameters: dict[str, torch.nn.Parameter], versions: Sequence[int] = ()
    ) -> None:
        """Takes the parameters by name, and the version that each microbatch uses.

        Without versions, a microbatch uses the newest one at its forward.
        """
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._versions = versions
        self._users = Counter(versions)  # microbatches that are not done, by version
        self._copies: dict[int, Version] = {}
        self._used: dict[int, int] = {}  # by microbatch in flight
        self.num_updates = 0
        self.peak_versions = 0
        self._keep_newest()

    def forward(self, microbatch: int) -> Version:
        """Returns the weights for a new microbatch."""
        number = self._versions[microbatch] if self._versions else self.num_updates
        if not self._versions:
            self._users[number] += 1
            self._keep_newest()
        self._used[microbatch] = number
        return self._copies[number]

    def backward(self, microbatch: int) -> int:
        """Adds the gradients of a microbatch from its version to `.grad`.

        Returns:
            The staleness: the number of updates since that version.
        """
        number = self._used.pop(microbatch)
        version = self._copies[number]
        for name, parameter in self._parameters.items():
            gradient = version[name].grad
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient.detach()
            version[name].grad = None
        self._users[number] -= 1
        self._drop_old()
        return self.num_updates - number

    def updated(self) -> None:
        """Starts a new version, after the weights have changed."""
        self.num_updates += 1
        self._drop_old()
        self._keep_newest()

    def _keep_newest(self) -> None:
        """Copies the weights if a microbatch needs this version."""
        if self._users[self.num_updates] and self.num_updates not in self._copies:
            self._copies[self.num_updates] = {
                name: parameter.detach().clone().requires_grad_()
                for name, parameter in self._parameters.items()
            }
            self.peak_versions = max(self.peak_versions, len(self._copies))

    def _drop_old(self) -> None:
        """Forgets versions that no microbatch needs any more."""
        for number in [n for n in self._copies if n < self.num_updates and not self._users[n]]:
            del self._copies[number]


__all__ = ["Stash"]
