"""Mixed precision: short floats for matrix products, float32 where sums need it.

As in Megatron-LM: norms, losses, sums of gradients and the optimizer's weights are float32.
Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core import deferred
from pycoll.parallel.core.specs import replace
from pycoll.parallel.features.batch_norm import SyncBatchNorm
from pycoll.parallel.features.feature import Build, Feature

_NORM = re.compile(r"Norm(\dd)?$")  # LayerNorm, BatchNorm2d, LlamaRMSNorm


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a model.

    Attributes:
        param: Weights and activations of all layers but norms.
        reduce: Gradients of these weights, while they are added up over microbatches and replicas.
        output: What a loss gets, and what `model(x)` returns.
        norm: Weights of norms, and the arithmetic within them.
        fp8: Names of linear layers, as patterns with `|` between alternatives, whose products are
            computed in 8 bits (features/float8.py) if their sizes are multiples of 16.
    """

    param: torch.dtype
    reduce: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    norm: torch.dtype = torch.float32
    fp8: str | None = None


_NAMED = {
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
    "fp32": Precision(torch.float32),
    "fp8": Precision(torch.bfloat16, fp8="*"),
}


class MixedPrecision(Feature):
    """Converts weights, and what enters and leaves the layers.

    Attributes:
        dtypes: The dtypes; None: those that the model has.
    """

    after = (SyncBatchNorm,)  # which gives norms their forward

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.dtypes = _dtypes(build.options.precision)

    def apply(self) -> None:
        if self.dtypes is None:
            return
        for module in self.build.model.modules():
            own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
            is_norm = _NORM.search(type(module).__name__) is not None
            dtype = self.dtypes.norm if is_norm else self.dtypes.param
            for parameter in own:
                deferred.cast(parameter, dtype)
            if is_norm or own:
                module.register_forward_pre_hook(_enters(dtype), with_kwargs=True)
            if is_norm:
                module.register_forward_hook(_leaves(self.dtypes.param))

    @property
    def output(self) -> torch.dtype | None:
        """The dtype of outputs; None: unchanged."""
        return None if self.dtypes is None else self.dtypes.output

    @property
    def reduce(self) -> torch.dtype | None:
        """The dtype in which gradients of 16-bit weights are added up; None: float32."""
        return None if self.dtypes is None else self.dtypes.reduce


def _dtypes(asked: Any) -> Precision | None:
    if asked is None or isinstance(asked, Precision):
        return asked
    if asked not in _NAMED:
        raise UsageError(
            f"precision is {asked!r}, expected {', '.join(map(repr, _NAMED))} or pc.Precision(...)"
        )
    return _NAMED[asked]


def _enters(dtype: torch.dtype) -> Any:
    def convert(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _to(args, dtype), _to(kwargs, dtype)

    return convert


def _leaves(dtype: torch.dtype) -> Any:
    def convert(module: nn.Module, args: Any, output: Any) -> Any:
        return _to(output, dtype)

    return convert


def _to(value: Any, dtype: torch.dtype) -> Any:
    """Converts the floating tensors of a structure."""
    return replace(value, Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x)


__all__ = ["MixedPrecision", "Precision"]
