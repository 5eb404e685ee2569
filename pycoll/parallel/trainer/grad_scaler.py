"""Loss scaling for float16: all ranks skip a step, or none does."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from pycoll.errors import UsageError
from pycoll.parallel.trainer.optimizers import Optimizer


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for a parallelized model.

    In the loop of PyTorch it is used as torch's. `model.step(..., scaler=scaler)` and then
    `optimizer.step()` scale, unscale, skip and update.

    A rank steps pieces, so an infinity may be in the pieces of one rank alone. The ranks agree,
    and their scales stay equal. Arguments and other methods are those of torch.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, and finds out whether all ranks' are finite.

        Args:
            optimizer: The optimizer that `pc.optimizer` returned.

        Raises:
            UsageError: It is another one.

        Cost: an all_reduce of one number over all ranks.
        """
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"GradScaler: {type(optimizer).__name__} is no optimizer of pc.optimizer: wrap it, "
                "or take torch.amp.GradScaler for a model that is not parallelized"
            )
        if not self._enabled:
            return
        super().unscale_(optimizer)
        found = self._state(optimizer)["found_inf_per_device"]
        worst = torch.tensor([max((float(one) for one in found.values()), default=0.0)])
        mesh = optimizer.trainer.mesh
        if mesh.world.size > 1:
            mesh.line(*mesh.sizes).all_reduce(worst, "max")
        if not found:  # no piece of this rank has a gradient
            found[worst.device] = worst.clone()
        for one in found.values():
            one.fill_(float(worst))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer, or, if a gradient of any rank is not finite, clears them all.

        Args:
            optimizer: The optimizer that `pc.optimizer` returned.

        Returns:
            What its `step` returns; None if the step was skipped.
        """
        if self._enabled:
            state = self._state(optimizer)
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            state["stage"] = OptState.STEPPED
            if any(float(one) for one in state["found_inf_per_device"].values()):
                optimizer.zero_grad()
                return None
        norm: float = optimizer.step(*args, **kwargs)  # type: ignore[assignment]
        return norm

    def follow(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Adapts the scale to a step of `model.step(..., scaler=)`; the optimizer calls it."""
        if not self._enabled:
            return
        self.scale(torch.zeros(()))  # makes the scale at the first call
        found = {torch.device("cpu"): torch.tensor(float(skipped))}
        self._state(optimizer).update(found_inf_per_device=found, stage=OptState.STEPPED)
        self.update()

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        return state


__all__ = ["GradScaler"]
