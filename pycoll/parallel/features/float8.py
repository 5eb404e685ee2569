"""Products of linear layers in 8 bits: weights and activations as e4m3, gradients as e5m2.

Each tensor has one scale, the power of two that brings its largest element just below the largest
number of the format. So the scale changes the bits only of elements that are 2^15 times smaller
than the largest one, and ranks with other samples round all others in the same way. Ranks of tp
agree on the scale of a tensor of which each has a part. Weights stay in the dtype of
`Precision.param`, and the optimizer steps them in float32.
Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pycoll.errors import UsageError
from pycoll.parallel.core.functions import Functions
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.features.feature import Build, Feature
from pycoll.parallel.features.precision import MixedPrecision
from pycoll.parallel.features.tensor.feature import TensorParallel
from pycoll.parallel.features.tensor.plan import Column, Row, Vocab

UNIT = 16  # sizes of a product in 8 bits are multiples of it
_VALUES, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


class Float8(Feature):
    """Replaces the products within the linear layers that `Precision.fp8` names."""

    after = (TensorParallel, MixedPrecision)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        precision = build[MixedPrecision].dtypes
        self._patterns = "" if precision is None else precision.fp8 or ""

    def apply(self) -> None:
        if self._patterns:
            _check_torch(str(getattr(self.build.grid, "device", "cpu")))
            self._replace()

    def apply_meta(self) -> None:
        if self._patterns:
            self._replace()

    def _replace(self) -> None:
        found = {n: m for n, m in self.build.model.named_modules() if self._takes(n, m)}
        if not found:
            raise UsageError(
                f"precision: no linear layer {self._patterns!r} has sizes that are multiples of "
                f"{UNIT}, as products in fp8 need: take 'bf16'"
            )
        for name, layer in found.items():
            functions = Functions()
            functions.taken[functional.linear] = partial(_linear, self._product(name, layer))
            functions.wrap(name, layer)

    def _takes(self, name: str, layer: nn.Module) -> bool:
        named = any(fnmatchcase(name, pattern) for pattern in self._patterns.split("|"))
        if not named or not isinstance(layer, nn.Linear):
            return False
        placement = self.build[TensorParallel].placements().get(id(layer.weight))
        whole = layer.weight.shape if placement is None else placement.shape
        if any(size % UNIT for size in whole):
            return False
        if any(size % UNIT for size in layer.weight.shape):
            raise UsageError(
                f"precision: layer {name!r}: products in fp8 need multiples of {UNIT}, but tp "
                f"gives this rank {tuple(layer.weight.shape)} of {tuple(whole)}: choose a smaller "
                "tp, or leave the layer out of Precision(fp8=)"
            )
        return True

    def _product(self, name: str, layer: nn.Linear) -> _Product:
        tensor = self.build[TensorParallel]
        group, style = self.build.grid.line("tp"), tensor.styles.get(name)
        if group.size == 1 or id(layer.weight) not in tensor.placements():
            return _Product()
        by_row = isinstance(style, Row)
        assert by_row or isinstance(style, (Column, Vocab))
        return _Product(group, x=by_row, gradient=not by_row)


@dataclass(frozen=True, slots=True)
class _Product:
    """What ranks share of the product of a layer.

    Attributes:
        group: The ranks that have parts of the weight; None: the weight is whole.
        x: Whether the input is a part.
        gradient: Whether the gradient of the output is a part.
    """

    group: AxisGroup | None = None
    x: bool = False
    gradient: bool = False


def _check_torch(device: str) -> None:
    """Multiplies two small matrices in 8 bits, as layers will.

    Raises:
        UsageError: torch cannot do it on this device.
    """
    try:
        one, x = torch.ones((), device=device), torch.ones(UNIT, UNIT, device=device)
        for dtype in (_VALUES, _GRADIENTS):
            torch._scaled_mm(x.to(dtype), x.to(_VALUES).t(), one, one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        raise UsageError(
            f"precision: torch {torch.__version__} cannot multiply matrices in fp8 on {device!r} "
            f"({reason}): take 'bf16'"
        ) from error


def _linear(product: _Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _Linear.apply(x, weight, product)
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    """x @ weight.T, and its gradients, as products in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: _Product) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale_x, scale_w = _scales([rows, weight], [product.x, True], product.group, _VALUES)
        rows8, weight8 = _cast(rows, scale_x, _VALUES), _cast(weight, scale_w, _VALUES)
        ctx.save_for_backward(rows8, weight, scale_x, scale_w)
        ctx.product, ctx.shape = product, x.shape
        y = _multiply(rows8, weight8.t(), scale_x, scale_w, x.dtype)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows8, weight, scale_x, scale_w = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        (scale,) = _scales([rows], [ctx.product.gradient], ctx.product.group, _GRADIENTS)
        gradient8 = _cast(rows, scale, _GRADIENTS)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            weight8 = _cast(weight, scale_w, _VALUES)
            of_x = _multiply(gradient8, weight8, scale, scale_w, gradient.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            more = -len(rows8) % UNIT  # zeros that make the number of tokens a multiple
            left, right = _longer(gradient8, more), _longer(rows8, more)
            of_weight = _multiply(left.t(), right, scale, scale_x, weight.dtype)
        return of_x, of_weight, None


def _scales(
    tensors: list[Tensor], parts: list[bool], group: AxisGroup | None, dtype: torch.dtype
) -> list[Tensor]:
    """The scale of each tensor; ranks agree on those of which they have parts.

    Cost: an all_reduce of one float32 for each tensor that is a part.
    """
    largest = torch.stack(
        [t.detach().abs().amax() if t.numel() else t.new_zeros(()) for t in tensors]
    )
    largest = largest.float()
    if group is not None and any(parts):
        here = torch.tensor(parts, device=largest.device)
        agreed = group.all_reduce(largest.clone(), "max")
        largest = torch.where(here, agreed, largest)
    room = torch.finfo(dtype).max / largest
    exponents = torch.frexp(room.clamp(2.0**-100, 2.0**100)).exponent - 1
    return list(torch.ldexp(torch.ones_like(room), exponents).unbind())


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.detach().float() * scale).to(dtype)


def _longer(x: Tensor, more: int) -> Tensor:
    return x if not more else torch.cat([x, x.new_zeros(more, x.shape[1])])


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b without their scales; GPUs want rows of `a` and columns of `b` to be contiguous."""
    columns = b.t().contiguous().t()
    return torch._scaled_mm(
        a.contiguous(), columns, scale_a.reciprocal(), scale_b.reciprocal(), out_dtype=dtype
    )


__all__ = ["Float8"]
