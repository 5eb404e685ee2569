"""The operators and collectives of a forward and a backward pass, recorded without values.

Invariant: an operator is recorded once, in the pass that runs it. A view moves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import as_call
from pycoll.parallel.core.ledger import Ledger
from pycoll.parallel.core.specs import replace, tensors_in
from pycoll.parallel.planner.operators import (
    counter_of,
    is_composite,
    moves_nothing,
    returns_tensors,
)

_DEVICE = torch.ops.prim.device.default
PASSES = ("forward", "backward", "recomputed")


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator.

    Attributes:
        name: Name of the operator, such as "aten.mm".
        layers: Full names of the layers that contain the call.
        part: The pass: "forward", "backward", or "recomputed" within the backward pass.
        flops: Floating-point operations; a multiplication and an addition are two.
        nbytes: Bytes of the tensors that it reads and writes.
    """

    name: str
    layers: frozenset[str]
    part: str
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sent:
    """One call of a collective, or one message.

    Attributes:
        axis: Axis of the mesh, such as "tp".
        collective: Name of the collective, or "send".
        layers: Full names of the layers that contain the call.
        part: The pass, as in `Operator`.
        nbytes: Bytes of the payload, as in `Ledger`.
    """

    axis: str
    collective: str
    layers: frozenset[str]
    part: str
    nbytes: int


@dataclass(slots=True)
class Trace:
    """Operators and collectives in the order in which they ran.

    Attributes:
        operators: The calls of operators.
        sent: The calls of collectives.
        events: Both, in their order.
    """

    events: list[Operator | Sent] = field(default_factory=list)

    @property
    def operators(self) -> list[Operator]:
        return [event for event in self.events if isinstance(event, Operator)]

    @property
    def sent(self) -> list[Sent]:
        return [event for event in self.events if isinstance(event, Sent)]


class _Recorder(TorchDispatchMode):
    """Adds each operator to a trace, decomposed as far as operations are counted."""

    def __init__(self, trace: Trace, root: str) -> None:
        super().__init__()
        self.trace, self.tracker = trace, ModuleTracker()
        self._prefix = f"{root}."

    def layers(self) -> frozenset[str]:
        """The layers that run now."""
        cut = len(self._prefix)
        parents = self.tracker.parents
        return frozenset(name[cut:] for name in parents if name.startswith(self._prefix))

    def part(self) -> str:
        """The pass that runs now."""
        if not self.tracker.is_bw:
            return PASSES[0]
        return PASSES[2] if torch.is_grad_enabled() else PASSES[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than all operators together
        packet = getattr(func, "_overloadpacket", None)
        if packet is None or not returns_tensors(func):
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if moves_nothing(func):
            return result
        counted = counter_of(func)
        count = counted(*args, **kwargs, out_val=result) if counted else 0
        tensors = [*tensors_in([args, kwargs]), *tensors_in(result)]
        self.trace.events.append(
            Operator(str(packet), self.layers(), self.part(), count, _nbytes(tensors))
        )
        return result


def _nbytes(tensors: list[Tensor]) -> int:
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct)


class TracedLedger(Ledger):
    """A ledger whose calls are recorded in a trace, once one runs."""

    recorder: _Recorder | None = None

    def of(self, axis: str, collective: str) -> Any:
        """Returns an entry that records what is added to it."""
        return _Entry(self, axis, collective)

    def hops(self, size: int) -> Iterator[int]:
        """Runs one of the equal steps of a ring, and records its events for each of them."""
        yield from range(min(size, 2))
        if size > 3 and self.recorder is not None:
            events = self.recorder.trace.events
            before = len(events)
            yield 2
            events.extend(events[before:] * (size - 4))
        elif size > 3:
            yield from range(2, size - 1)
        if size > 2:
            yield size - 1


class _Entry:
    """Stands for an entry of a ledger: what is added to `nbytes` becomes an event."""

    calls = 0
    waited_s = 0.0

    def __init__(self, ledger: TracedLedger, axis: str, collective: str) -> None:
        self._ledger, self._key = ledger, (axis, collective)

    @property
    def nbytes(self) -> int:
        return 0

    @nbytes.setter
    def nbytes(self, value: int) -> None:
        recorder = self._ledger.recorder
        if recorder is not None:
            event = Sent(*self._key, recorder.layers(), recorder.part(), value)
            recorder.trace.events.append(event)


@contextmanager
def without_values() -> Iterator[None]:
    """Within it tensors have shapes but no values."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        yield


def like(batch: Any) -> Any:
    """A batch of the same shapes and dtypes; call within `without_values`."""
    return replace(batch, Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"))


def record(
    model: nn.Module,
    x: Any,
    *,
    y: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    ledger: TracedLedger | None = None,
) -> Trace:
    """Runs both passes of a model without values; call within `without_values`.

    Args:
        model: A model of fake tensors.
        x: A batch of fake tensors, as for `model.step`.
        y: Targets, for `loss`.
        loss: As in `step`; None: the backward pass begins with a sum of the outputs.
        ledger: Ledger of the groups that the model's layers use.

    Returns:
        The trace.

    Raises:
        UsageError: The model cannot run without values; the message has its error.
    """
    trace = Trace()
    recorder = _Recorder(trace, type(model).__name__)
    args, kwargs = as_call(x)
    try:
        # The tracker is around both passes, so that the backward pass knows its layers.
        with recorder.tracker, recorder:
            if ledger is not None:
                ledger.recorder = recorder
            output = model(*args, **kwargs)
            made = output if loss is None else loss(output, y)
            floating = [t for t in tensors_in(made) if t.requires_grad and t.is_floating_point()]
            if floating:
                # Through a sum: the pass into the last layer is noticed on its way there only.
                torch.stack([t.float().sum() for t in floating]).sum().backward()
    except UsageError:
        raise
    except Exception as error:
        shapes = [tuple(tensor.shape) for tensor in tensors_in([args, kwargs])]
        last = next((event.name for event in reversed(trace.operators)), "no operator")
        raise UsageError(
            f"{type(model).__name__} cannot be traced with inputs of shape {shapes}: {error} "
            f"(behind {last}): its forward must not depend on values"
        ) from error
    finally:
        if ledger is not None:
            ledger.recorder = None
    return trace


__all__ = [
    "PASSES",
    "Operator",
    "Sent",
    "Trace",
    "TracedLedger",
    "like",
    "record",
    "without_values",
]
