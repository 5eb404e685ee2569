"""Muon: momentum whose matrices are made orthogonal before they are added."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.optim.tensors import Found, OfWholeTensors

_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the paper


class Muon(OfWholeTensors):
    """Steps as `torch.optim.Muon` does, in the dtype of the parameters (torch's in bfloat16).

    Where ranks have pieces, each matrix travels to one rank, which computes, and its result to all
    ranks: the ranks share the matrices out. A step costs 5 products of matrices for each of 5
    iterations, a reduce and a broadcast of each matrix over all ranks, and their memory on the rank
    that computes.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024,
    https://kellerjordan.github.io/posts/muon/.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        orthogonal: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        """Makes the optimizer.

        Args:
            params: Parameters, or groups of them, as for every optimizer of torch.
            lr: Learning rate.
            weight_decay: Factor of the weight.
            momentum: Decay of the average of the gradients.
            nesterov: Look one step ahead along the average.
            ns_steps: Number of iterations that make a matrix orthogonal.
            eps: Least norm by which a matrix is divided; in groups without `orthogonal`, what is
                added to the root of the average square.
            adjust_lr_fn: None or "original": larger steps for matrices with more rows than columns;
                "match_rms_adamw": steps as large as AdamW's.
            orthogonal: False in a group of embeddings, biases and norms gives AdamW's step there.
            betas: Decays of AdamW's averages.

        Raises:
            UsageError: A value is out of range, or a parameter of a group with `orthogonal` is no
                matrix.
        """
        if lr < 0 or weight_decay < 0 or not 0 <= momentum < 1:
            raise UsageError(
                f"lr, weight_decay and momentum are {lr}, {weight_decay} and {momentum}, expected "
                "0 or more, and momentum less than 1"
            )
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise UsageError(
                f"adjust_lr_fn is {adjust_lr_fn!r}, expected None, 'original' or 'match_rms_adamw'"
            )
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        defaults |= {"nesterov": nesterov, "ns_steps": ns_steps, "eps": eps}
        defaults |= {"adjust_lr_fn": adjust_lr_fn, "orthogonal": orthogonal, "betas": betas}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["orthogonal"] and parameter.dim() != 2:
                    raise UsageError(
                        f"Muon: a parameter has shape {tuple(parameter.shape)}, expected matrices: "
                        "give the others in a group with orthogonal=False"
                    )

    def update(self, found: Found) -> None:
        """See OfWholeTensors."""
        orthogonal = {i for i, group in enumerate(self.param_groups) if group["orthogonal"]}
        steps = []
        for i, parameter, gradient in found:
            if i in orthogonal:
                steps.append((i, parameter, self._average(i, parameter, gradient)))
            else:
                self._adamw(self.param_groups[i], parameter, gradient)
        made = self.tensors.on_whole(orthogonal, steps, self._orthogonal)
        for (i, parameter, _), by in zip(steps, made, strict=True):
            group = self.param_groups[i]
            rate = _adjusted(group["adjust_lr_fn"], *self.tensors.shape(parameter))
            parameter.mul_(1 - float(group["lr"]) * group["weight_decay"])
            parameter.add_(by, alpha=-float(group["lr"]) * rate)

    def _average(self, i: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        group, state = self.param_groups[i], self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"]) if group["nesterov"] else average

    def _orthogonal(self, i: int, matrix: Tensor) -> Tensor:
        """The nearest matrix with equal singular values, roughly, by a Newton-Schulz iteration."""
        group, (a, b, c) = self.param_groups[i], _COEFFICIENTS
        tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.T if tall else matrix
        x = x / x.norm().clamp(min=group["eps"])  # largest singular value at most 1
        for _ in range(group["ns_steps"]):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x

    def _adamw(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps, lr = float(state["step"]), float(group["lr"])
        mean = state["exp_avg"].lerp_(gradient, 1 - first)
        squares = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (squares / (1 - second**steps)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.addcdiv_(mean, root, value=-lr / (1 - first**steps))


def _adjusted(kind: str | None, rows: int, columns: int) -> float:
    """The factor of the learning rate for a matrix."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


__all__ = ["Muon"]
