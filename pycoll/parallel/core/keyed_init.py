"""Keyed initialisation: a parameter's values depend only on a seed and on its name.

`keyed_init` records the operations that fill parameters. Once all modules exist and their names
are known, it runs these operations again with random numbers keyed by seed, name and place of the
element. Plain modules need no change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pycoll.parallel.core.deferred import Deferred, Fill, defer
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.random import normal, uniform

# Operations that fill a tensor at random: name within torch.ops.aten, and argument defaults.
_FILLS: dict[str, Callable[..., Tensor]] = {"uniform_": uniform, "normal_": normal}
# Operations that create a random tensor that is no parameter yet: keyed by call order.
_MAKES = {"rand": uniform, "randn": normal}


class keyed_init:
    """Makes models whose initial weights are the same on every mesh: `with keyed_init(mesh): ...`.

    Modules made within the context fill their parameters and buffers by their own code
    (torch.nn.init, Tensor.normal_ and similar functions), but with numbers keyed by `seed` and the
    parameter's full name. `torch.rand` and `torch.randn` are keyed by the order of their calls.
    Within `torch.device("meta")` too, they take no memory: `parallelize` makes each rank's part.

    Args:
        mesh: The ranks; each of them makes the same whole model.
        seed: Seed of all numbers.

    Cost: that of the initialisation, and a few microseconds for each recorded operation.
    """

    def __init__(self, mesh: Mesh | None = None, seed: int = 0) -> None:
        del mesh  # The values do not depend on the mesh.
        self._seed = seed
        self._names = _Names()
        self._notes = _Notes(seed)

    def __enter__(self) -> keyed_init:
        self._names.watch()
        self._trunc_normal = nn.init.trunc_normal_
        nn.init.trunc_normal_ = _trunc_normal_
        self._notes.__enter__()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._notes.__exit__(error_type, error, traceback)
        self._names.unwatch()
        nn.init.trunc_normal_ = self._trunc_normal
        if error is None:
            with torch.no_grad():
                tensors = self._names.tensors()
                for name, tensor in tensors:
                    self._notes.run(name, tensor)
                defer(self._notes.deferred, tensors)


def _with_key(
    key: str, make: Fill, name: str, shape: tuple[int, ...], *args: Any, start: int
) -> Tensor:
    """Makes numbers whose key is not the name of the tensor."""
    return make(key, shape, start=start)


def _trunc_normal_(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws once: torch's own function redraws rejected values, which cannot be recorded."""
    low, high = (math.erf((bound - mean) / std / math.sqrt(2.0)) for bound in (a, b))
    with torch.no_grad():
        edge = 1.0 - torch.finfo(tensor.dtype).eps
        tensor.uniform_(low, high, generator=generator).clamp_(-edge, edge).erfinv_()
        return tensor.mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)


class _Names:
    """Records each module's parent, so that parameters have full names in the end."""

    def __init__(self) -> None:
        self._modules: dict[nn.Module, None] = {}  # in order of creation
        self._children: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        def parent_of(module: nn.Module, name: str, child: nn.Module | None) -> None:
            self._modules[module] = None
            if child is not None:
                self._modules[child] = None
                self._children.add(child)

        def owner_of(module: nn.Module, name: str, tensor: Tensor | None) -> None:
            self._modules[module] = None

        self._handles = [
            torch_module.register_module_module_registration_hook(parent_of),
            torch_module.register_module_parameter_registration_hook(owner_of),
        ]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and buffers of the top-level modules, by full name."""
        found: list[tuple[str, Tensor]] = []
        for root in self._modules:
            if root not in self._children:
                found += [*root.named_parameters(), *root.named_buffers()]
        return found


class _Notes(TorchDispatchMode):
    """Records in-place operations on memory that a random operation has filled."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self.deferred = Deferred(seed)
        self._calls = self._fills = 0
        self._of: dict[int, list[Callable[[str, Tensor], None]]] = {}  # by address
        self._kept: list[torch.UntypedStorage] = []  # keeps addresses from being reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        on_meta = kwargs.get("device") == torch.device("meta")
        if on_meta or any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves(args)):
            return self._call_on_meta(name, func, args, kwargs)
        if name in _MAKES:
            made = func(*args, **kwargs)
            self._calls += 1
            key = f"{self._seed}/made {self._calls}"
            return made.copy_(_MAKES[name](key, tuple(made.shape)))
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is None or not name.endswith("_") or name.startswith("_"):
            return func(*args, **kwargs)
        address = x.untyped_storage().data_ptr()
        if name in _FILLS:
            self._of.setdefault(address, [])
            self._kept.append(x.untyped_storage())
        if address not in self._of:
            return func(*args, **kwargs)
        place = (tuple(x.shape), x.stride(), x.storage_offset())
        fill = _FILLS.get(name)
        nth = len(self._of[address])
        if fill is None:
            func(*args, **kwargs)
        else:  # perhaps not a parameter
            self._fills += 1
            x.copy_(fill(f"{self._seed}/filled {self._fills}", tuple(x.shape), *args[1:]))

        def again(full_name: str, whole: Tensor) -> None:
            part = torch.as_strided(whole, *place)
            if fill is None:
                func(part, *args[1:], **kwargs)
            else:
                values = fill(f"{self._seed}/{full_name}/{nth}", tuple(part.shape), *args[1:])
                part.copy_(values)

        self._of[address].append(again)
        return x

    def _call_on_meta(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Records the operation, to run it for each rank's part: see deferred.py."""
        fill: Fill | None = None
        key = ""
        if name in _MAKES:
            self._calls += 1
            key = f"{self._seed}/made {self._calls}"
            fill = partial(_with_key, key, _MAKES[name])
        elif name in _FILLS:
            self._fills += 1
            key, fill = f"{self._seed}/filled {self._fills}", _FILLS[name]
        return self.deferred.call(func, args, kwargs, fill, key)

    def run(self, name: str, tensor: Tensor) -> None:
        """Runs the operations recorded for a tensor's memory, once."""
        if tensor.is_meta:
            return
        for again in self._of.pop(tensor.untyped_storage().data_ptr(), []):
            again(name, tensor)


__all__ = ["keyed_init"]
