"""Adafactor: Adam whose average of squares is the product of a row and a column."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.optim.tensors import Found, OfWholeTensors, square


class Adafactor(OfWholeTensors):
    """Steps as `torch.optim.Adafactor` does.

    The state of a matrix of r rows and c columns has r + c numbers, on each rank that has a piece.
    A step makes one temporary tensor of the size of each whole matrix; where ranks have pieces, an
    all_reduce of r + c numbers for each matrix, and of two float64 for each parameter.

    Source: Shazeer, Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost,
    arXiv:1804.04235.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """Makes the optimizer.

        Args:
            params: Parameters, or groups of them, as for every optimizer of torch.
            lr: Largest relative step; after t steps it is at most 1 / sqrt(t).
            beta2_decay: Exponent of the number of steps in the decay of the averages.
            eps: Least root of an average, None for the machine precision; least scale of a tensor.
            d: Largest root mean square of an update.
            weight_decay: Factor of the weight.

        Raises:
            UsageError: A value is out of range.
        """
        for name, value in {"lr": lr, "weight_decay": weight_decay, "eps[1]": eps[1]}.items():
            if value < 0:
                raise UsageError(f"{name} is {value}, expected 0 or more")
        if beta2_decay > 0 or d < 1:
            raise UsageError(
                f"beta2_decay is {beta2_decay} and d is {d}, expected 0 or less and 1 or more"
            )
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    def update(self, found: Found) -> None:
        """See OfWholeTensors."""
        parameters = [parameter for _, parameter, _ in found]
        means = [self._means(parameter, gradient) for _, parameter, gradient in found]
        means = self.tensors.add_up(parameters, means)
        steps, rows = [], []
        for (i, parameter, gradient), mean in zip(found, means, strict=True):
            steps.append(self._direction(self.param_groups[i], parameter, gradient, mean))
            rows.append(torch.stack([square(parameter), square(steps[-1])]))
        sums = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)
        norms = self.tensors.sums(parameters, sums).sqrt().tolist()
        for (i, parameter, _), by, (weight, length) in zip(found, steps, norms, strict=True):
            group, root = self.param_groups[i], math.sqrt(self.tensors.shape(parameter).numel())
            rate = min(float(group["lr"]), float(self.state[parameter]["step"]) ** -0.5)
            rate *= max(group["eps"][1], weight / root)
            parameter.mul_(1 - float(group["lr"]) * group["weight_decay"])
            parameter.add_(by, alpha=-rate / max(1.0, length / (root * group["d"])))

    def _means(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Mean squares of this rank's elements, of each row and of each column of a matrix."""
        if len(self.tensors.shape(parameter)) < 2:
            return gradient.new_zeros(0)
        squares = self.tensors.spread(parameter, gradient).square()
        return torch.cat([squares.mean(-1).view(-1), squares.mean(-2).view(-1)])

    def _direction(
        self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, means: Tensor
    ) -> Tensor:
        """The step of this rank's elements before it is scaled."""
        state, shape = self.state[parameter], self.tensors.shape(parameter)
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, *shape[-1:])
        if not state:
            state["step"] = torch.tensor(0.0)
            if len(shape) < 2:
                state["variance"] = torch.zeros_like(parameter)
            else:
                # With a dimension more than the tensor has: checkpoints take what has its shape, or
                # that of a flat piece, as numbers for each element.
                state["row_var"] = parameter.new_zeros((1, *rows))
                state["col_var"] = parameter.new_zeros((1, *columns))
        state["step"] += 1
        new = float(state["step"]) ** group["beta2_decay"]
        least = group["eps"][0]
        least = torch.finfo(parameter.dtype).eps if least is None else least
        if len(shape) < 2:
            variance = state["variance"].lerp_(gradient.square(), new).clone()
        else:
            num_rows = math.prod(rows)
            row = state["row_var"].lerp_(means[:num_rows].view(1, *rows), new)[0]
            column = state["col_var"].lerp_(means[num_rows:].view(1, *columns), new)[0]
            whole = (row @ column).div_(row.mean(-2, keepdim=True).clamp_(min=least))
            variance = self.tensors.cut(parameter, whole).clone()
        return variance.clamp_(min=least * least).rsqrt_().mul_(gradient)


__all__ = ["Adafactor"]
