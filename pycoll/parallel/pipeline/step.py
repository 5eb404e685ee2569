"""One step of one rank: runs the actions of its program in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pycoll.errors import UsageError
from pycoll.parallel.core.devices import Clock
from pycoll.parallel.core.specs import Spec
from pycoll.parallel.pipeline.backward import backward_inputs
from pycoll.parallel.pipeline.messages import Arrival, Messages
from pycoll.parallel.pipeline.microbatches import Call
from pycoll.parallel.pipeline.schedules.actions import Action, Kind, Schedule
from pycoll.parallel.pipeline.schedules.transfers import receive_of
from pycoll.parallel.pipeline.stages import Stages
from pycoll.parallel.pipeline.stash import Stash

Arrivals = dict[tuple[int, int], Arrival]  # what enters a stage, by stage and microbatch


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the caller that a step calls."""

    loss: Callable[[Any, Any], Any] | None
    on_microbatch: Callable[[int], None] | None = None
    on_last_backward: Callable[[int], None] | None = None
    on_weight_grad_ready: Callable[[int], None] | None = None
    update: Callable[[int, int], None] | None = None
    split_backward: bool = True


@dataclass(slots=True)
class Saved:
    """Data that a forward keeps for its backward."""

    inputs: list[torch.Tensor]  # inputs whose gradients the previous stage wants
    outputs: list[torch.Tensor]
    later: Callable[[], None] | None = None  # computes the weights' gradients, after I


@dataclass(slots=True)
class Moment:
    """A time span of this rank, in nanoseconds of CLOCK_MONOTONIC; without an action, a wait.

    During a step, the times are marks of its clock.
    """

    action: Action
    start_ns: Any
    end_ns: Any
    waited: bool = False


@dataclass(slots=True)
class StepRun:
    """State of one step of one rank."""

    stages: Stages
    schedule: Schedule
    messages: Messages
    calls: Sequence[Call]
    targets: Sequence[Any] | None
    hooks: Hooks
    arrivals: Arrivals
    announced: bool  # shapes are new: each message has an announcement
    train: bool
    scale: float
    stashes: Mapping[int, Stash]
    clock: Clock
    losses: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    staleness: dict[tuple[int, int], int] = field(default_factory=dict)
    peak_live: int = 0
    _saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)  # microbatches without gradients, by stage

    def run(self, program: Sequence[Action]) -> None:
        """Runs the actions; returns when they are done and all messages are received."""
        handlers = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weights,
            Kind.U: self._update,
            Kind.RECV_F: self._post,
            Kind.RECV_B: self._post,
        }
        for action in program:
            if self._makes_weight_grads(action):
                self._left[action.stage] = self._left.get(action.stage, 0) + 1
        for action in program:
            if (handler := handlers.get(action.kind)) is not None:  # sends are part of compute
                handler(action)
        self.messages.finish()

    def read_clock(self) -> None:
        """Turns the marks of all moments into times; waits until the last one is reached."""
        for moment in self.moments:
            moment.start_ns = self.clock.ns(moment.start_ns)
            moment.end_ns = self.clock.ns(moment.end_ns)

    # Transfers.

    def _post(self, action: Action) -> None:
        stage, i = action.stage, action.microbatch
        if self.announced:
            return  # received on demand, after its announcement
        if action.kind is Kind.RECV_F:
            self.messages.post((Kind.F, stage, i), self.arrivals[stage, i].specs)
        elif wanted := self._wanted_of(stage + 1, i):
            self.messages.post((Kind.B, stage, i), wanted)

    def _take(self, action: Action) -> list[torch.Tensor]:
        """Waits for the tensors that an action reads."""
        stage, i = action.stage, action.microbatch
        kind = Kind.F if action.kind is Kind.F else Kind.B
        begin = self.clock.now()
        remote = receive_of(self.schedule, action) is not None
        if remote and self.announced:
            if kind is Kind.F:
                self.arrivals[stage, i] = self.messages.announced((kind, stage, i))
                expected = self.arrivals[stage, i].specs
            else:
                expected = self._wanted_of(stage + 1, i)
            self.messages.post((kind, stage, i), expected)
        tensors = self.messages.take((kind, stage, i))
        if remote:
            self.moments.append(Moment(action, begin, self.clock.now(), waited=True))
        return tensors

    def _wanted_of(self, stage: int, i: int) -> tuple[Spec, ...]:
        """Specs of the gradients for what entered a stage."""
        return tuple(spec for spec in self.arrivals[stage, i].specs if spec.requires_grad)

    # Compute.

    def _forward(self, action: Action) -> None:
        stage, i = action.stage, action.microbatch
        arrived, hidden, arrival = None, None, Arrival((), {})
        if stage > 0:
            arrived = self._take(action)
            arrival = self.arrivals[stage, i]
        begin = self.clock.now()
        if arrived is not None:
            grads = (spec.requires_grad and self.train for spec in arrival.specs)
            hidden = tuple(t.requires_grad_(g) for t, g in zip(arrived, grads, strict=True))
        notes = dict(arrival.notes)
        args, kwargs = self.calls[i] if self.calls else ((), {})
        stash = self.stashes.get(stage)
        replaced = stash.forward(i) if stash is not None and self.train else None
        self._tell_microbatch(i)
        with torch.set_grad_enabled(self.train):
            made = self.stages.forward(stage, args, kwargs, hidden, notes, replaced)
            is_last = stage == self.stages.num_stages - 1
            outputs = [self._loss(made, i)] if is_last else list(made)
        if self.train:
            inputs = [tensor for tensor in hidden or () if tensor.requires_grad]
            self._saved[stage, i] = Saved(inputs, [t for t in outputs if t.requires_grad])
            self.peak_live = max(self.peak_live, len(self._saved))
        self._note(action, begin)
        if not is_last:
            self._hand_on(stage + 1, i, outputs, notes)

    def _hand_on(self, to: int, i: int, outputs: list[torch.Tensor], notes: Any) -> None:
        specs = tuple(Spec.of(tensor) for tensor in outputs)
        known = self.arrivals.get((to, i))
        if self.announced:
            self.arrivals[to, i] = known = Arrival(specs, notes)
        elif self.train and known is not None and known.specs != specs:
            raise UsageError(
                f"stage {to - 1} makes {specs} of microbatch {i}, but {known.specs} before, from "
                "inputs of the same shapes: give PipelineRuntime(dynamic_shapes=True)"
            )
        tensors = tuple(tensor.detach() for tensor in outputs)
        self.messages.send((Kind.F, to, i), tensors, known if self.announced else None)

    def _loss(self, output: Any, i: int) -> torch.Tensor:
        """Returns a microbatch's scaled sum of losses; records the sum and the count."""
        if self.hooks.loss is None:
            self.outputs[i] = output
            return torch.zeros(())
        assert self.targets is not None
        made = self.hooks.loss(output, self.targets[i])
        if isinstance(made, tuple):
            total, count = made
        else:  # a mean, over the samples of the targets
            count = len(self.targets[i])
            total = made * count
        self.losses[i] = (total.detach(), count)
        return total if self.scale == 1.0 else total * self.scale

    def _backward(self, action: Action) -> None:
        """Runs B or I; after I, the weights' gradients wait for W, unless backward is not split."""
        stage, i = action.stage, action.microbatch
        saved = self._saved[stage, i]
        gradients: list[torch.Tensor | None] = [None] * len(saved.outputs)
        if stage < self.stages.num_stages - 1 and self._wanted_of(stage + 1, i):
            gradients = list(self._take(action))
        begin = self.clock.now()
        self._tell_microbatch(i)
        self._tell_last(action)
        if action.kind is Kind.I and self.hooks.split_backward:
            parameters = self.stages.parameters_of(stage).values()
            found, saved.later = backward_inputs(saved.outputs, gradients, saved.inputs, parameters)
        else:
            if saved.outputs:
                torch.autograd.backward(saved.outputs, gradients)
            found = [tensor.grad for tensor in saved.inputs]
        self._note(action, begin)
        if saved.inputs:
            back = zip(saved.inputs, found, strict=True)
            sent = tuple(torch.zeros_like(t) if g is None else g.detach() for t, g in back)
            self.messages.send((Kind.B, stage - 1, i), sent)
        self._tell_ready(action)
        if action.kind is Kind.B:
            self._done(stage, i)
        else:
            saved.outputs, saved.inputs = [], []

    def _weights(self, action: Action) -> None:
        begin = self.clock.now()
        self._tell_microbatch(action.microbatch)
        self._tell_last(action)
        later = self._saved[action.stage, action.microbatch].later
        if later is not None:
            later()
        self._note(action, begin)
        self._tell_ready(action)
        self._done(action.stage, action.microbatch)

    def _done(self, stage: int, i: int) -> None:
        """Records that a microbatch has left a stage."""
        del self._saved[stage, i]
        if (stash := self.stashes.get(stage)) is not None:
            self.staleness[stage, i] = stash.backward(i)

    def _makes_weight_grads(self, action: Action) -> bool:
        late = Kind.W if self.hooks.split_backward else Kind.I
        return action.kind in (Kind.B, late)

    def _tell_last(self, action: Action) -> None:
        last = self._makes_weight_grads(action) and self._left[action.stage] == 1
        if last and self.hooks.on_last_backward is not None:
            self.hooks.on_last_backward(action.stage)

    def _tell_ready(self, action: Action) -> None:
        if not self._makes_weight_grads(action):
            return
        self._left[action.stage] -= 1
        if not self._left[action.stage] and self.hooks.on_weight_grad_ready is not None:
            self.hooks.on_weight_grad_ready(action.stage)

    def _update(self, action: Action) -> None:
        begin = self.clock.now()
        assert self.hooks.update is not None
        self.hooks.update(action.stage, action.microbatch)
        self.stashes[action.stage].updated()
        self._note(action, begin)

    def _tell_microbatch(self, i: int) -> None:
        if self.hooks.on_microbatch is not None:
            self.hooks.on_microbatch(i)

    def _note(self, action: Action, begin: Any) -> None:
        self.moments.append(Moment(action, begin, self.clock.now()))


__all__ = ["Arrivals", "Hooks", "Moment", "StepRun"]
