"""Optimizers for large batches: their step has the length that the norm of each tensor sets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.optim.tensors import Found, OfWholeTensors, square


class Layerwise(OfWholeTensors):
    """An optimizer whose steps depend on norms of whole tensors.

    A step costs one pass over the parameters more than AdamW's; where ranks have pieces, an
    all_reduce of two float64 for each parameter.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            if defaults[name] < 0:
                raise UsageError(f"{name} is {defaults[name]}, expected 0 or more")
        super().__init__(params, defaults)

    def update(self, found: Found) -> None:
        """See OfWholeTensors."""
        groups = [self.param_groups[i] for i, _, _ in found]
        parameters = [parameter for _, parameter, _ in found]
        steps = [
            self.direction(group, parameter, gradient)
            for group, (_, parameter, gradient) in zip(groups, found, strict=True)
        ]
        squares = [
            torch.stack([square(p), square(by)]) for p, by in zip(parameters, steps, strict=True)
        ]
        rows = torch.stack(squares) if found else torch.zeros(0, 2, dtype=torch.float64)
        norms = self.tensors.sums(parameters, rows).sqrt().tolist()
        for group, parameter, by, (weight, step) in zip(
            groups, parameters, steps, norms, strict=True
        ):
            self.move(group, parameter, by, self.ratio(group, weight, step))

    @abstractmethod
    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        """The direction of the step, in the shape of the parameter."""

    def ratio(self, group: dict[str, Any], weight: float, step: float) -> float:
        """The factor of the learning rate, from the 2-norms of a tensor and of its direction."""
        if not group["adapt"] or not weight or not step:
            return 1.0
        return weight / step

    def move(self, group: dict[str, Any], parameter: Tensor, by: Tensor, ratio: float) -> None:
        """Steps one parameter."""
        parameter.add_(by, alpha=-group["lr"] * ratio)


class LAMB(Layerwise):
    """Adam whose step for each tensor has the length lr x the norm of the tensor.

    Source: You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, algorithm 2,
    with phi(z) = z.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        """Makes the optimizer.

        Args:
            params: Parameters, or groups of them, as for every optimizer of torch.
            lr: Learning rate.
            betas: Decay of the averages of the gradient and of its square.
            eps: Added to the root of the average square.
            weight_decay: Factor of the weight in the direction.
            adapt: Whether the norms count; False in a group of biases and norms gives AdamW's step
                there.

        Raises:
            UsageError: A value is out of range.
        """
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas are {betas}, expected two numbers from 0 to 1, without 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "adapt": adapt})

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps = float(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1 - first) / (1 - first**steps)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        by = mean.div_((square / (1 - second**steps)).sqrt_().add_(group["eps"]))
        return by.add_(parameter, alpha=group["weight_decay"])


class LARS(Layerwise):
    """SGD with momentum whose learning rate for each tensor follows its norm.

    The rate is lr x trust x |w| / |g + weight_decay w|.
    Source: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks,
    arXiv:1708.03888; the norm of the sum instead of the sum of norms, as in LAMB's algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        adapt: bool = True,
    ) -> None:
        """Makes the optimizer.

        Args:
            params: Parameters, or groups of them, as for every optimizer of torch.
            lr: Learning rate.
            momentum: Factor of the previous step.
            weight_decay: Factor of the weight in the direction.
            trust: Factor of the ratio of the norms.
            adapt: Whether the norms count; False in a group of biases and norms gives SGD's step
                there.

        Raises:
            UsageError: A value is out of range.
        """
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum is {momentum}, expected 0 or more and less than 1")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "trust": trust, "adapt": adapt})

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient.add(parameter, alpha=group["weight_decay"])

    def ratio(self, group: dict[str, Any], weight: float, step: float) -> float:
        ratio = super().ratio(group, weight, step)
        return ratio * group["trust"] if group["adapt"] else ratio

    def move(self, group: dict[str, Any], parameter: Tensor, by: Tensor, ratio: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        last = state["momentum_buffer"].mul_(group["momentum"]).add_(by, alpha=group["lr"] * ratio)
        parameter.sub_(last)


__all__ = ["LAMB", "LARS", "Layerwise"]
