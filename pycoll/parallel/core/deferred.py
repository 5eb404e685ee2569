"""Tensors on the device "meta" whose making is recorded, so that each rank makes its own part.

One tensor after the other is made whole on the CPU, cut, and freed: no rank ever holds all of them.
Where the mesh is on a device, the parts of a model on the CPU are likewise placed there one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from pycoll.errors import UsageError
from pycoll.parallel.core.placement import Placement

_LATER = "_pycoll_later"  # attribute of parameters and buffers that are not made yet
Fill = Callable[..., Tensor]  # of a key, a shape, arguments of the operation, and start=
_CHUNK = 1 << 16  # random numbers made at once


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as a view of its storage, after the first `num_notes` operations on that."""

    key: int
    num_notes: int
    place: tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Note:
    """An operation that wrote to a storage.

    Attributes:
        run: The operation: in place on `into`, or one whose result `into` is.
        into: What it wrote.
        args: Positional arguments, with Refs in place of tensors on "meta".
        kwargs: Keyword arguments, likewise.
        is_in_place: Whether `into` is its first argument.
        fill: Makes random numbers from a key, for an operation that fills at random.
        key: The key, unless the tensor has a name.
    """

    run: Any
    into: Ref
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_in_place: bool
    fill: Fill | None = None
    key: str = ""


class Deferred:
    """Records operations on tensors of the device "meta"; makes tensors from them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of: dict[int, list[Note]] = {}  # by storage
        self._kept: dict[int, torch.UntypedStorage] = {}  # keeps addresses from being reused

    def ref(self, x: Tensor) -> Ref:
        """A reference to what `x` is now."""
        storage = x.untyped_storage()
        key = storage._cdata
        self._kept[key] = storage
        place = (tuple(x.shape), x.stride(), int(x.storage_offset()))
        return Ref(key, len(self._of.get(key, ())), place, x.dtype)

    def call(
        self, func: Any, args: Any, kwargs: Any, fill: Fill | None = None, key: str = ""
    ) -> Any:
        """Runs an operation on "meta", and records what it writes."""
        name = func.overloadpacket.__name__
        is_in_place = name.endswith("_") and not name.startswith("_")
        refs = _pytree.tree_map_only(Tensor, self._ref_of_meta, (args, kwargs))
        known = {x.untyped_storage()._cdata for x in _pytree.tree_leaves(args) if _is_meta(x)}
        result = func(*args, **kwargs)
        into = args[0] if is_in_place else result
        if not _is_meta(into):
            if any(map(_is_meta, _pytree.tree_leaves(result))):
                raise UsageError(
                    f"keyed_init: {func} on the device 'meta' has several results: make the model "
                    "on the CPU"
                )
            return result
        is_new = into.untyped_storage()._cdata not in known
        if name.startswith("empty") or not (is_in_place or is_new):
            return result  # no values, or a view
        target = self.ref(into)
        note = Note(func, target, refs[0], refs[1], is_in_place, fill, key)
        self._of.setdefault(target.key, []).append(note)
        return result

    def _ref_of_meta(self, x: Tensor) -> Any:
        return self.ref(x) if x.is_meta else x

    def size_of(self, ref: Ref) -> int:
        """Number of elements of the storage."""
        return self._kept[ref.key].nbytes() // ref.dtype.itemsize

    def make(self, ref: Ref, name: str = "", whole: Tensor | None = None) -> Tensor:
        """Makes a tensor on the CPU.

        Args:
            ref: The tensor.
            name: Its full name, which keys random numbers; empty: the order of calls does.
            whole: Memory for its storage, flat; None: new memory.
        """
        if whole is None:
            whole = torch.empty(self.size_of(ref), dtype=ref.dtype, device="cpu")
        nth = 0  # since the first random operation
        for note in self._of.get(ref.key, [])[: ref.num_notes]:
            part = _view(whole, note.into)
            if note.fill is not None:
                self._fill(note, f"{self._seed}/{name}/{nth}" if name else note.key, part)
            else:
                args, kwargs = _pytree.tree_map_only(Ref, self.make, (note.args, note.kwargs))
                if note.is_in_place:
                    note.run(part, *args[1:], **kwargs)
                else:
                    part.copy_(note.run(*args, **_on_cpu(kwargs)))
            nth += nth > 0 or note.fill is not None
        return _view(whole, ref)

    def _fill(self, note: Note, key: str, part: Tensor) -> None:
        assert note.fill is not None
        if not part.is_contiguous():
            part.copy_(note.fill(key, tuple(part.shape), *note.args[1:], start=0))
            return
        flat = part.view(-1)  # the numbers take several times the memory of the tensor
        for start in range(0, flat.numel(), _CHUNK):
            chunk = flat[start : start + _CHUNK]
            chunk.copy_(note.fill(key, tuple(chunk.shape), *note.args[1:], start=start))


def _view(whole: Tensor, ref: Ref) -> Tensor:
    shape, strides, offset = ref.place
    return torch.as_strided(whole, shape, strides, offset + int(whole.storage_offset()))


def _is_meta(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs


class Later(Protocol):
    """How a parameter or buffer will get its values.

    Attributes:
        placement: This rank's part; None: all of it.
    """

    placement: Placement | None

    def part(self, dtype: torch.dtype) -> Tensor:
        """This rank's part."""

    def write(self, into: Tensor) -> None:
        """Writes this rank's part, without other memory where that is possible."""


@dataclass(slots=True)
class Recorded:
    """Values that recorded operations make."""

    deferred: Deferred
    ref: Ref
    name: str
    placement: Placement | None = None

    def part(self, dtype: torch.dtype) -> Tensor:
        """See Later."""
        whole = self.deferred.make(self.ref, self.name)
        return (whole if self.placement is None else self.placement.take(whole)).to(dtype)

    def write(self, into: Tensor) -> None:
        """See Later."""
        is_whole = self.placement is None and into.numel() == self.deferred.size_of(self.ref)
        if is_whole and into.is_cpu and into.dtype == self.ref.dtype and into.is_contiguous():
            made = self.deferred.make(self.ref, self.name, into.view(-1))
            if made.is_contiguous():
                return
        into.copy_(self.part(into.dtype))


@dataclass(slots=True)
class Elsewhere:
    """The values of a parameter on the CPU, of which a part goes to the mesh's device."""

    values: Tensor
    placement: Placement | None = None

    def part(self, dtype: torch.dtype) -> Tensor:
        """This rank's part."""
        whole = self.values
        return (whole if self.placement is None else self.placement.take(whole)).to(dtype)

    def write(self, into: Tensor) -> None:
        """Writes this rank's part."""
        into.copy_(self.part(into.dtype))


def defer(deferred: Deferred, tensors: list[tuple[str, Tensor]]) -> None:
    """Notes for tensors on "meta", by full name, how they will be made."""
    for name, tensor in tensors:
        if tensor.is_meta:
            defer_by(tensor, Recorded(deferred, deferred.ref(tensor), name))


def defer_by(tensor: Tensor, later: Later) -> None:
    """Notes for a tensor on "meta" how it will get its values."""
    setattr(tensor, _LATER, later)


def without_memory(model: nn.Module, device: torch.device) -> None:
    """Moves parameters to `device`, in place: shapes without memory, until `values_of`.

    Those that are there already keep their values, and buffers are made or moved at once.

    Raises:
        UsageError: A tensor on "meta" was not made within `keyed_init`, or a tensor is neither on
            the CPU nor on `device`.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and not hasattr(tensor, _LATER):
            raise UsageError(
                f"parallelize: {name!r} is on the device 'meta', and nothing says how to make it: "
                "make the model within `with torch.device('meta'), pc.keyed_init(mesh):`, or call "
                "pc.load_pretrained(model, folder) before"
            )
        if not (tensor.is_meta or tensor.is_cpu or tensor.device == device):
            raise UsageError(
                f"parallelize: {name!r} is on {tensor.device}, the mesh is on {device}: leave the "
                f"model on the CPU, or make the mesh by pc.mesh(device={tensor.device.type!r})"
            )
    for parameter in model.parameters():
        if parameter.device == device:
            continue
        later = getattr(parameter, _LATER) if parameter.is_meta else Elsewhere(parameter.detach())
        blank = nn.Parameter(_blank(parameter.dtype, tuple(parameter.shape), device))
        torch.utils.swap_tensors(parameter, blank.requires_grad_(parameter.requires_grad))
        setattr(parameter, _LATER, later)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.device != device:
                made = getattr(buffer, _LATER).part(buffer.dtype) if buffer.is_meta else buffer
                module._buffers[name] = made.to(device)


def shorten(parameter: Tensor, placement: Placement) -> None:
    """Keeps a rank's part of a parameter, made already or not."""
    later: Later | None = getattr(parameter, _LATER, None)
    if later is None:
        parameter.data = placement.take(parameter.data)
        return
    later.placement = placement
    parameter.data = _blank(parameter.dtype, placement.local_shape, parameter.device)


def cast(parameter: Tensor, dtype: torch.dtype) -> None:
    """Converts a parameter in place, made already or not."""
    if getattr(parameter, _LATER, None) is None:
        parameter.data = parameter.data.to(dtype)
    else:
        parameter.data = _blank(dtype, tuple(parameter.shape), parameter.device)


def values_of(parameter: Tensor) -> Tensor:
    """The values of a rank's part of a parameter; made now if they are not yet."""
    later: Later | None = getattr(parameter, _LATER, None)
    if later is None:
        return parameter
    delattr(parameter, _LATER)
    return later.part(parameter.dtype).to(parameter.device)


def write_values(parameter: Tensor, into: Tensor) -> None:
    """As `into.copy_(values_of(parameter))`, with less memory."""
    later: Later | None = getattr(parameter, _LATER, None)
    if later is None:
        into.copy_(parameter)
        return
    delattr(parameter, _LATER)
    later.write(into)
    _give_back()


def _give_back() -> None:
    """Gives unused memory back to the system: parts of several sizes leave gaps between them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _blank(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


__all__ = [
    "Deferred",
    "Fill",
    "cast",
    "Later",
    "defer",
    "defer_by",
    "shorten",
    "values_of",
    "without_memory",
    "write_values",
]
