"""The loop that PyTorch users write: `model(x)`, `loss.backward()`, `optimizer.step()`.

As with DistributedDataParallel, each backward pass ends with the mean of the replicas' gradients
in `.grad`, and gradients that are there already stay and are added to.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pycoll.errors import UsageError
from pycoll.parallel.core import specs
from pycoll.parallel.core.lateness import Work
from pycoll.parallel.core.logits import cast, whole
from pycoll.parallel.core.step_result import StepResult
from pycoll.parallel.trainer.elementwise import is_elementwise
from pycoll.parallel.trainer.owner import owner_of, record
from pycoll.parallel.trainer.trainer import Trainer

OF_OPTIMIZER = "_pycoll_steps"  # attribute of optimizers that step them rightly: the trainer


class PlainLoop:
    """Reduces the gradients of backward passes that `model.step` does not run."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._running = False  # a backward pass runs
        self._kept: dict[str, Tensor] = {}  # gradients from before the running pass
        self._num_samples = 0  # of all replicas since the last step of the optimizer
        self._has_run = False
        self._work, self._started_s, self._waited_before_s = Work(trainer.mesh.ledger), 0.0, 0.0
        trainer.model.register_forward_pre_hook(self._before, with_kwargs=True)
        trainer.model.register_forward_hook(self._after)
        for bucket in trainer.reducer.buckets:
            for slot in bucket.slots:
                slot.parameter.register_hook(self._on_gradient)
        trainer.clearers.append(self.clear)
        trainer.steppers.append(self.stepped)

    def clear(self) -> None:
        """Forgets gradients that are kept for the next backward pass."""
        self._kept.clear()
        self._running = False

    def stepped(self) -> None:
        """Counts a step of the optimizer."""
        if not self._has_run:
            return
        self._has_run = False
        self._trainer.step_idx += 1
        self._num_samples = 0
        self._trainer.reducer.drop()  # a forward without a backward keeps the old values

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self._trainer.in_step:
            return
        trainer = self._trainer
        trainer.executor.check_called_alone()
        if not torch.is_grad_enabled():
            return
        trainer.policy.check_called_alone()
        if self._running:  # the last backward pass raised an error
            trainer.reducer.finish()
            trainer.clear()
        if not self._has_run:
            self._started_s = time.monotonic()
            self._waited_before_s = trainer.mesh.ledger.waited_s
            self._work.restart(trainer.ended_ns / 1e9 or self._started_s)
        self._work.enter("")  # `place_of` waits for the other replicas
        x = specs.hidden_of(args, kwargs)
        count = 0 if x is None or not x.dim() else len(x)
        first, total = trainer.place_of(count)
        trainer.positions.move(
            step=trainer.step_idx, first_sample=self._num_samples + first, num_samples=count
        )
        self._num_samples += total
        self._has_run = True
        self._work.enter("forward")

    def _after(self, model: Any, args: Any, output: Any) -> Any:
        """Makes parts of the output whole: any loss may follow."""
        if self._trainer.in_step:
            return output
        output = self._trainer.sequence.whole(whole(output))
        first = next((x for x in specs.tensors_in(output) if x.requires_grad), None)
        if first is not None:
            first.register_hook(lambda _: self._work.enter("backward"))
        return output if self._trainer.output is None else cast(output, self._trainer.output)

    def _on_gradient(self, gradient: Tensor) -> None:
        """Runs before autograd adds a gradient to `.grad`."""
        if self._trainer.in_step or self._running:
            return
        self._running = True
        reducer = self._trainer.reducer
        for name, piece in reducer.pieces.items():
            if piece.value.grad is not None:
                self._keep(name, piece.value.grad)
                piece.value.grad = None
        reducer.begin(reduce=self._trainer.syncing)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _keep(self, name: str, gradient: Tensor) -> None:
        """Keeps a copy: buckets reuse the memory of their gradients."""
        if name in self._kept:
            self._kept[name] += gradient
        else:
            self._kept[name] = gradient.detach().clone()

    def _finish(self) -> None:
        """Runs at the end of a backward pass."""
        self._running = False
        self._work.enter("between steps")
        if not self._trainer.syncing:
            return
        reducer = self._trainer.reducer
        reducer.finish()
        self._trainer.settle_mean()
        for name, gradient in self._kept.items():
            value = reducer.pieces[name].value
            value.grad = gradient if value.grad is None else value.grad.add_(gradient)
        self._kept.clear()
        self._tell()

    def _tell(self) -> None:
        """Makes the step's result, which the step of `pc.optimizer` completes."""
        trainer, ledger = self._trainer, self._trainer.mesh.ledger
        before = () if trainer.last is None else trainer.last.unused
        unused = tuple(trainer.reducer.unused)
        trainer.busy_s = list(self._work.busy_s.values())
        trainer.last = StepResult(
            step=trainer.step_idx,
            loss=math.nan,
            tokens=0,
            seconds=time.monotonic() - self._started_s,
            waited_s=ledger.waited_s - self._waited_before_s,
            unused=unused,
            unused_now=tuple(name for name in unused if name not in before),
            rank=trainer.mesh.world.rank,
            samples=self._num_samples,
            ranks=trainer.mesh.world.size,
            plain=True,
        )


def attach(trainer: Trainer) -> None:
    """Follows backward passes outside of the trainer, and torch optimizers of its parameters."""
    PlainLoop(trainer)
    record(trainer)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check))
        _watching.append(register_optimizer_step_post_hook(_count))


_watching: list[Any] = []


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, OF_OPTIMIZER):
        return
    trainer: Any = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is None or not parameter.requires_grad:
                continue
            trainer, name = owner
            piece = trainer.reducer.pieces.get(name)
            if piece is None or piece.value is not parameter:
                kind = type(optimizer).__name__
                raise UsageError(
                    f"{kind} would not train {name!r}: its gradient and its optimizer state are "
                    f"shared out, or kept in float32: pc.optimizer({kind}(model.parameters(), ...))"
                )
    if trainer is not None:
        parts = any(placement.dim is not None for placement in trainer.placements.values())
        if parts and not is_elementwise(optimizer):
            kind = type(optimizer).__name__
            raise UsageError(
                f"{kind} does not step each element by itself, and tp gives this rank parts of "
                f"tensors: pc.optimizer({kind}(model.parameters(), ...)) says what is possible"
            )
    setattr(optimizer, OF_OPTIMIZER, trainer)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    trainer: Any = getattr(optimizer, OF_OPTIMIZER, None)
    if trainer is not None:
        trainer.stepped()


__all__ = ["OF_OPTIMIZER", "attach"]
