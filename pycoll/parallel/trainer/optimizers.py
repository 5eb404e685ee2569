"""Wraps a torch optimizer: it steps this rank's pieces; norms and clipping span all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.data.reducer import Piece
from pycoll.parallel.trainer.trainer import Trainer

_TRAINER = "_pycoll_trainer"  # attribute of a parallelized model's parameters


def attach(trainer: Trainer) -> None:
    """Records the trainer on the model's parameters."""
    for name, parameter in trainer.parameters.items():
        setattr(parameter, _TRAINER, (trainer, name))


class Optimizer:
    """Steps the parameters of a parallelized model.

    Attributes:
        inner: The torch optimizer; its groups hold this rank's pieces. Give it to a learning rate
            scheduler.
        clip: Norm to which gradients are clipped; None: no clipping.
        names: Names of the parameters of each group.
        trainer: The trainer of the model.
    """

    def __init__(self, inner: torch.optim.Optimizer, clip: float | None) -> None:
        self.inner, self.clip = inner, clip
        parameters = [p for group in inner.param_groups for p in group["params"]]
        known: list[Any] = [getattr(parameter, _TRAINER, None) for parameter in parameters]
        trainer = next((entry[0] for entry in known if entry), None)
        if trainer is None or None in known or inner.state:
            raise UsageError(
                "optimizer: expected a new optimizer of the parameters of one model that "
                "pc.parallelize returned"
            )
        self.trainer: Trainer = trainer
        if trainer.updates is not None:
            trainer.updates.take(inner, clip)
        names = {id(p): entry[1] for p, entry in zip(parameters, known, strict=True)}
        self.names: list[list[str]] = []
        pieces = trainer.reducer.pieces
        for group in inner.param_groups:
            self.names.append([names[id(p)] for p in group["params"]])
            mine = [pieces[name] for name in self.names[-1] if name in pieces]
            group["params"] = [piece.value for piece in mine]

    def step(self) -> float:
        """Clips the gradients, steps, and brings the parameters up to date on all ranks.

        A schedule that updates weights within `model.step` has already stepped them.

        Returns:
            The norm of all gradients before clipping, equal on every rank; also in the step's
            result. After several updates, it is the norm of the last one.

        Cost: an all_reduce of one number over all ranks; with ZeRO 1 and 2 an all_gather of the
            parameters over their replicas.
        """
        start_ns = time.monotonic_ns()
        waited_before = self.trainer.mesh.ledger.waited_s
        norm = self.grad_norm()
        if self.trainer.updates is None:
            self._clip(norm)
            self.inner.step()
            self.trainer.reducer.publish()
        ledger, last = self.trainer.mesh.ledger, self.trainer.last
        ledger.span("optimizer", "compute", start_ns, time.monotonic_ns())
        if last is not None:
            last.grad_norm = norm
            last.seconds += (time.monotonic_ns() - start_ns) / 1e9
            last.waited_s += ledger.waited_s - waited_before
        for watcher in self.trainer.watchers:
            watcher(self.trainer)
        self.trainer.clear()
        return norm

    def _clip(self, norm: float) -> None:
        factor = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        for piece in self._pieces():
            if piece.value.grad is not None and factor < 1.0:
                piece.value.grad.mul_(factor)

    def grad_norm(self) -> float:
        """The 2-norm of all ranks' gradients; each element counts once."""
        squares = [
            torch.linalg.vector_norm(piece.value.grad).double() ** 2
            for piece in self._pieces()
            if piece.owned and piece.value.grad is not None
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        mesh = self.trainer.mesh
        if mesh.world.size > 1:
            mesh.line(*mesh.sizes).all_reduce(total.view(1))
        return math.sqrt(float(total))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; `step` does this too."""
        self.trainer.clear()

    def _pieces(self) -> Iterable[Piece]:
        return self.trainer.reducer.pieces.values()


def optimizer(inner: torch.optim.Optimizer, clip: float | None = None) -> Optimizer:
    """Makes an optimizer of torch step a parallelized model.

    Args:
        inner: A new torch optimizer of `model.parameters()`, in any groups. Its update must be
            element-wise, as in SGD and AdamW.
        clip: Largest norm of all gradients; larger gradients are scaled down to it.

    Returns:
        The optimizer; call its `step()` after each `model.step(...)`.

    Raises:
        UsageError: The parameters do not belong to a parallelized model, or it has stepped.
    """
    return Optimizer(inner, clip)


def trainer_of(model: nn.Module) -> Trainer:
    """The trainer of a parallelized model.

    Raises:
        UsageError: The model was not returned by `parallelize`.
    """
    for parameter in model.parameters():
        entry: Any = getattr(parameter, _TRAINER, None)
        if entry:
            trainer: Trainer = entry[0]
            return trainer
    raise UsageError("expected a model that pc.parallelize returned")


__all__ = ["Optimizer", "attach", "optimizer", "trainer_of"]
