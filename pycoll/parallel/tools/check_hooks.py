"""Records the first steps of a run in files, for `pycoll check` and `pycoll scale`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from pycoll.errors import UsageError
from pycoll.parallel.tools import step_parts

if TYPE_CHECKING:
    from pycoll.parallel.core.step_result import StepResult
    from pycoll.parallel.tools.activations import Activations
    from pycoll.parallel.trainer.trainer import Trainer

FOLDER = "PYCOLL_CHECK"  # environment variable: where to write, while `pycoll check` runs a script
NUM_STEPS = 3
TIMES = "PYCOLL_TIMES"  # environment variable of `pycoll scale`: number of steps, ":", a file


def prepare(model: nn.Module) -> bool:
    """Converts a model to float64 if a check runs; returns whether one does."""
    if FOLDER not in os.environ:
        return False
    torch.set_default_dtype(torch.float64)
    model.double()
    return True


def watch(trainer: Trainer) -> None:
    """Records the first steps if a check runs; the script ends after them."""
    if TIMES in os.environ:
        steps, _, path = os.environ[TIMES].partition(":")
        trainer.watchers.append(lambda trainer: _time(trainer, int(steps), Path(path)))
    if FOLDER not in os.environ:
        return
    from pycoll.parallel.tools.activations import Activations
    from pycoll.parallel.trainer.gather_full import whole_weights

    folder = Path(os.environ[FOLDER])
    activations = Activations(trainer)
    _write(trainer, folder / "start.pt", {"initial weight": whole_weights(trainer.model)})
    trainer.watchers.append(lambda trainer: _record(trainer, activations, folder))


def _last(trainer: Trainer) -> StepResult:
    if trainer.last is None or trainer.last.plain:
        raise UsageError(
            "check: the losses are those that model.step returns, and this script calls "
            "loss.backward() itself: call model.step(x, y, loss=...)"
        )
    return trainer.last


def _time(trainer: Trainer, steps: int, path: Path) -> None:
    last = _last(trainer)
    step_parts.write(path, last)
    if last.step + 1 == steps:
        trainer.mesh.world.barrier()
        raise SystemExit(0)


def _record(trainer: Trainer, activations: Activations, folder: Path) -> None:
    from pycoll.parallel.trainer.gather_full import whole_gradients, whole_weights

    last = _last(trainer)
    if last.updates > 1:
        raise UsageError(
            "check: this schedule trains with weights that are some updates old, so no mesh equals "
            "one process: give model.step microbatches=1, or take a schedule with a flush, such as "
            "1f1b"
        )
    step = last.step
    activations.write(folder / f"step-{step}-rank-{trainer.mesh.world.rank:05d}.pt")
    found = {
        "loss": {"": torch.tensor(last.loss, dtype=torch.float64)},
        "gradient norm": {"": torch.tensor(last.grad_norm, dtype=torch.float64)},
        "gradient": whole_gradients(trainer.model),
        "weight": whole_weights(trainer.model),
    }
    _write(trainer, folder / f"step-{step}.pt", found)
    if step + 1 == NUM_STEPS:
        raise SystemExit(0)


def _write(trainer: Trainer, path: Path, found: dict[str, dict[str, torch.Tensor]]) -> None:
    if trainer.mesh.world.rank == 0:
        torch.save(found, path)
    trainer.mesh.world.barrier()


__all__ = ["FOLDER", "NUM_STEPS", "TIMES", "prepare", "watch"]
