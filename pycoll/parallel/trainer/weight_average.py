"""Exponential moving average of the weights, on the pieces that ranks step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.trainer.owner import trainer_of


class EMA:
    """An average of the weights that follows them: `average = decay average + (1 - decay) weight`.

    Each rank averages the pieces that its optimizer steps, so ZeRO and tp share the average out,
    too, and it does not depend on the mesh. `pc.save(..., state={"ema": ema})` writes it and
    `pc.load` reads it on any mesh. Frozen parameters and buffers are not averaged.

    Attributes:
        decay: Weight of the previous average.
        averages: Averages of this rank's pieces, by the parameter's full name, in the dtype that
            the optimizer steps.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        """Starts with the weights that the model has now.

        Args:
            model: A model that `parallelize` returned.
            decay: From 0 to 1, without 1.

        Raises:
            UsageError: `decay` is out of range, or the model was not parallelized.

        Cost: memory of one copy of this rank's pieces; one pass over them for each update.
        """
        if not 0 <= decay < 1:
            raise UsageError(f"EMA: decay is {decay}, expected 0 or more and less than 1")
        self.decay = decay
        self._reducer = trainer_of(model).reducer
        self.averages = {
            name: piece.value.detach().clone() for name, piece in self._reducer.pieces.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the weights; call it after each step of the optimizer."""
        for name, piece in self._reducer.pieces.items():
            self.averages[name].lerp_(piece.value.detach(), 1 - self.decay)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Gives the model the averages within the context, for evaluation. Collective.

        Cost: twice what ZeRO sends after a step; the averages and the weights change places, so no
            memory.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, piece in self._reducer.pieces.items():
            kept: Tensor = piece.value.detach().clone()
            piece.value.copy_(self.averages[name])
            self.averages[name].copy_(kept)
        self._reducer.publish()


__all__ = ["EMA"]
