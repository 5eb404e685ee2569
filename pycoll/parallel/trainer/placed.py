"""How a batch passes through a model whose modules are placed on ranks by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pycoll.parallel.core.batches import as_call, num_samples
from pycoll.parallel.core.losses import Loss, numbers
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.core.specs import tensors_in
from pycoll.parallel.features.data.reducer import Reducer
from pycoll.parallel.features.place.feature import Placed
from pycoll.parallel.features.place.mail import Arrivals, Mail
from pycoll.parallel.features.place.run import Passing
from pycoll.parallel.features.place.segments import Segment
from pycoll.parallel.pipeline.agree import agree
from pycoll.parallel.pipeline.microbatches import signature
from pycoll.parallel.trainer.executors import Parts, Ran, refuse_call

_KNOWN = 64  # sets of shapes that are remembered


class PlacedExecutor:
    """Runs this rank's segments: the forward passes of some microbatches are ahead of backward.

    The order of passes is the same on all ranks, so with the order of segments it has no cycle.
    """

    stands_in = False

    def __init__(
        self,
        placed: Placed,
        mesh: Mesh,
        reducer: Reducer,
        positions: Positions,
        *,
        needs_barrier: bool,
    ) -> None:
        """Takes the placed model.

        Args:
            placed: The model and its segments.
            mesh: The ranks.
            reducer: Adds up gradients of a segment's parameters while other segments run.
            positions: Receives the samples of each microbatch.
            needs_barrier: All replicas run as many microbatches.
        """
        self._placed, self._mesh, self._reducer = placed, mesh, reducer
        self._positions = positions
        self.runs_empty = self.evaluates_empty = needs_barrier
        self._known: dict[tuple[str, bool, bool], Arrivals] = {}

    def run(self, parts: Parts, loss: Loss, first_sample: int, *, reduce: bool) -> Ran:
        """See Executor."""
        self._reducer.begin(reduce=reduce, staged=True)
        ran = Ran()
        if parts:
            ran = self._pass(parts, loss, first_sample, backward=True)
        if reduce:
            self._reducer.finish()
        return ran

    def evaluate(self, parts: Parts, loss: Loss, first_sample: int) -> tuple[float, float]:
        """See Executor."""
        if not parts:
            return 0.0, 0.0
        ran = self._pass(parts, loss, first_sample, backward=False)
        return ran.loss_sum, ran.count

    def check_called_alone(self) -> None:
        """It cannot be."""
        refuse_call(self._mesh)

    def _pass(self, parts: Parts, loss: Loss, first_sample: int, *, backward: bool) -> Ran:
        comm, start_ns = self._mesh.comm("pp"), time.monotonic_ns()
        calls = [as_call(x) for x, _ in parts]
        agree(comm, (0,), calls, [y for _, y in parts], has_loss=False)
        graphs = [self._placed.segments(args, kwargs) for args, kwargs in calls]
        most = max(len(each.graph.nodes) for each in graphs)
        mail = Mail(self._mesh.transfers("pp"), most)
        bubble_s, passing, firsts = [0.0], dict[int, Passing](), [first_sample]
        for x, _ in parts:
            firsts.append(firsts[-1] + num_samples(x))
        losses: list[tuple[Any, Any]] = []
        clock = self._mesh.ledger.clock

        def note(name: str, waited: bool, start: Any, end: Any) -> None:
            self._mesh.ledger.span(name, "bubble" if waited else "compute", start, end)
            if waited:
                bubble_s[0] += (clock.ns(end) - clock.ns(start)) / 1e9

        def forward(i: int) -> None:
            known = self._arrivals(signature([parts[i][0]]), backward)
            one = passing[i] = Passing(
                self._placed.model, graphs[i], comm.rank, i, mail, known, note, clock
            )
            self._move(firsts, i)
            samples = list(tensors_in(list(calls[i])))
            one.forward(samples, lambda output: loss(output, parts[i][1]))
            if one.loss is not None:
                losses.append((one.loss[0].detach(), one.loss[1]))

        def back(i: int) -> None:
            self._move(firsts, i)
            last = i + 1 == len(parts)
            passing.pop(i).backward(*self._hooks(last))

        ahead = min(comm.size, len(parts)) if backward else len(parts)
        for i in range(len(parts) + ahead):
            if backward and i >= ahead:
                back(i - ahead)
            if i < len(parts):
                forward(i)
        mail.finish()
        totals = np.array([sum(numbers(of)) for of in zip(*losses, strict=True)] or [0, 0], float)
        comm.broadcast(totals, root=graphs[0].loss_rank)
        entry = self._mesh.ledger.of("pp", "send")
        entry.calls += 1
        entry.nbytes += mail.sent_bytes
        busy_s = {"stages": (time.monotonic_ns() - start_ns) / 1e9 - bubble_s[0]}
        return Ran(float(totals[0]), int(totals[1]), bubble_s[0], 0, busy_s)

    def _hooks(self, last: bool) -> tuple[Callable[[Segment], None], Callable[[Segment], None]]:
        """What the reducer hears of the segments of a microbatch."""

        def before(segment: Segment) -> None:
            if last:
                self._reducer.expect(segment.last_gradients)

        def after(segment: Segment) -> None:
            if last:
                self._reducer.complete(segment.last_gradients)

        return before, after

    def _arrivals(self, shapes: str, backward: bool) -> Arrivals:
        """What results of inputs of these shapes are."""
        key = shapes, backward, self._placed.model.training
        while key not in self._known and len(self._known) >= _KNOWN:
            del self._known[next(iter(self._known))]  # the oldest: the same on all ranks
        return self._known.setdefault(key, {})

    def _move(self, firsts: list[int], i: int) -> None:
        self._positions.move(first_sample=firsts[i], num_samples=firsts[i + 1] - firsts[i])


__all__ = ["PlacedExecutor"]
