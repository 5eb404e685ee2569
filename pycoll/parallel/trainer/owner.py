"""The trainer of a parameter: an attribute of a parallelized model's parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.trainer.trainer import Trainer

_ATTRIBUTE = "_pycoll_trainer"


def record(trainer: Trainer) -> None:
    """Records the trainer, and their names, on its parameters."""
    for name, parameter in trainer.parameters.items():
        setattr(parameter, _ATTRIBUTE, (trainer, name))


def owner_of(parameter: Tensor) -> tuple[Trainer, str] | None:
    """The trainer of a parameter and its name there; None if it is not of a parallelized model."""
    found: Any = getattr(parameter, _ATTRIBUTE, None)
    return found  # type: ignore[no-any-return]


def trainer_of(model: nn.Module) -> Trainer:
    """The trainer of a parallelized model.

    Raises:
        UsageError: The model was not returned by `parallelize`.
    """
    for parameter in model.parameters():
        if (owner := owner_of(parameter)) is not None:
            return owner[0]
    raise UsageError("expected a model that pc.parallelize returned")


__all__ = ["owner_of", "record", "trainer_of"]
