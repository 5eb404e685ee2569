"""Wraps a torch optimizer: it steps this rank's pieces; norms and clipping span all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import optim

from pycoll.errors import UsageError
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.core.step_result import StepResult
from pycoll.parallel.features.data.reducer import Piece
from pycoll.parallel.optim import OfWholeTensors
from pycoll.parallel.trainer.elementwise import is_elementwise
from pycoll.parallel.trainer.fused import fuse
from pycoll.parallel.trainer.norms import Norms, start_norms
from pycoll.parallel.trainer.owner import owner_of
from pycoll.parallel.trainer.pieces import Pieces
from pycoll.parallel.trainer.plain_loop import OF_OPTIMIZER


class Optimizer(optim.Optimizer):
    """Steps the parameters of a parallelized model; an optimizer of torch to all who take one.

    Attributes:
        inner: The torch optimizer; its groups hold this rank's pieces.
        clip: Norm to which gradients are clipped; None: no clipping.
        names: Names of the parameters of each group.
        trainer: The trainer of the model.
        before_change: Called by a step that will change the state, after it has heard all that it
            needs of ranks with the same parameters; None: nothing is called.
    """

    # torch's GradScaler then leaves the decision to `step`, which refuses it.
    _step_supports_amp_scaling = True

    def __init__(self, inner: optim.Optimizer, clip: float | None) -> None:
        parameters = [p for group in inner.param_groups for p in group["params"]]
        known = [owner for p in parameters if (owner := owner_of(p)) is not None]
        if not known or len(known) < len(parameters) or inner.state:
            raise UsageError(
                "optimizer: expected a new optimizer of the parameters of one model that "
                "pc.parallelize returned"
            )
        self.inner, self.clip = inner, clip
        self.before_change: Callable[[], None] | None = None
        self.trainer = trainer = known[0][0]
        names = {id(p): entry[1] for p, entry in zip(parameters, known, strict=True)}
        self.names = [[names[id(p)] for p in group["params"]] for group in inner.param_groups]
        self._make_exact()
        clips = [clip, *(group.get("clip") for group in inner.param_groups)]
        some_clip = next((one for one in clips if one is not None), None)
        self.inner = inner = trainer.policy.take(inner, some_clip)
        pieces = trainer.reducer.pieces
        for group, of_group in zip(inner.param_groups, self.names, strict=True):
            mine = [pieces[name] for name in of_group if name in pieces]
            group["params"] = [piece.value for piece in mine]
        fuse(inner)
        super().__init__(inner.param_groups, inner.defaults)
        self._share()
        for one in (self, inner):
            setattr(one, OF_OPTIMIZER, trainer)

    def _share(self) -> None:
        """One state and one list of groups for both optimizers."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _make_exact(self) -> None:
        """Shows an optimizer whole tensors, or refuses one that cannot step pieces. Collective."""
        trainer, inner = self.trainer, self.inner
        kind = type(inner).__name__
        if not isinstance(inner, OfWholeTensors) and is_elementwise(inner):
            return
        # A stage may have whole parameters where another one has pieces.
        causes = gather_objects(self._cause_of_pieces(), trainer.mesh.world)
        cause = next((text for text in causes if text), "")
        if not cause:
            return  # whole parameters: any optimizer is exact
        if isinstance(inner, OfWholeTensors):
            trainer.policy.refuse_sums(kind)
            inner.tensors = Pieces(trainer, self.names)
        else:
            raise UsageError(
                f"optimizer: {kind} does not step each element by itself (norms of a tensor, or "
                f"factored state), and {cause}: its weights would depend on the mesh. Take zero=0 "
                "and tp=1 with it, or one of pc.optim (LAMB, Adafactor, Muon), or AdamW"
            )

    def _cause_of_pieces(self) -> str:
        """Why this rank has pieces of parameters; empty if it has whole ones."""
        trainer, level = self.trainer, self.trainer.reducer.level
        if level:
            return f"zero={level} gives a rank pieces"
        if any(placement.dim is not None for placement in trainer.placements.values()):
            return f"tp={trainer.mesh.size('tp')} gives a rank pieces"
        pieces = trainer.reducer.pieces.values()
        if any(piece.value.dim() != len(piece.placement.shape) for piece in pieces):
            return "16-bit parameters have a flat copy in float32"
        return ""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses groups that the torch optimizer did not have.

        Raises:
            UsageError: The group is new.
        """
        if not any(group is param_group for group in self.inner.param_groups):
            raise UsageError(
                "add_param_group: this rank's pieces are made by pc.optimizer: give all groups to "
                "the torch optimizer before"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, with its place in the mesh; `pc.save` writes that of all ranks."""
        return {**self.inner.state_dict(), "pycoll": self._place()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned on the same rank of the same mesh.

        Raises:
            UsageError: It comes from another rank, mesh or ZeRO level.
        """
        state_dict = dict(state_dict)
        place = state_dict.pop("pycoll", None)
        if place != self._place():
            raise UsageError(
                f"load_state_dict: the state is that of {place}, expected that of {self._place()}: "
                "pc.save and pc.load move state between meshes"
            )
        self.inner.load_state_dict(state_dict)
        self._share()

    def _place(self) -> dict[str, Any]:
        mesh = self.trainer.mesh
        return {**mesh.sizes, "zero": self.trainer.reducer.level, "rank": mesh.world.rank}

    def step(self, closure: Callable[[], Any] | None = None) -> float:  # type: ignore[override]
        """Clips the gradients, steps, and brings the parameters up to date on all ranks.

        A schedule that updates weights within `model.step` has already stepped them.

        Args:
            closure: Called first, with gradients enabled; computes them.

        Raises:
            UsageError: torch's GradScaler calls this.

        Returns:
            The norm of all gradients before clipping, equal on every rank; also in the step's
            result. After several updates, it is the norm of the last one.

        Cost: an all_reduce of one number for each group, and four for each rank, over all ranks;
            with ZeRO 1 and 2 an all_gather of the parameters over their replicas.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        if getattr(self, "found_inf", None) is not None:
            raise UsageError(
                "GradScaler: each rank would decide by its own gradients whether it skips a step, "
                "and the ranks would differ: take pc.GradScaler, on which all ranks agree"
            )
        start_ns, ledger = time.monotonic_ns(), self.trainer.mesh.ledger
        waited_before, start = ledger.waited_s, ledger.clock.now()
        norms, scaler = self._start_norms(), self.trainer.scaler
        scales = scaler is not None and scaler.is_enabled()
        # The norm is that of all ranks of a replica, so all of them skip a step or none does.
        skipped = scales and not math.isfinite(norms.total)
        policy = self.trainer.policy
        policy.worked(self.trainer.busy_s)
        if self.before_change is not None:
            norms.wait()
            self.before_change()
        if skipped:
            policy.skip(self.inner)
        else:
            policy.step(self.inner, partial(self._clip, norms))
        norm, late = norms.total, policy.late(norms.late)
        if scaler is not None:
            scaler.follow(self, skipped=skipped)
            self.trainer.scaler = None
        last = self.trainer.last
        ledger.span("optimizer", "compute", start, ledger.clock.now())
        if last is not None:
            last.grad_norm, last.late, last.skipped = norm, late, skipped
            last.waited_s += ledger.waited_s - waited_before
            last.seconds += (time.monotonic_ns() - start_ns) / 1e9
        for watcher in self.trainer.watchers:
            watcher(self.trainer)
        self.trainer.stepped()
        self.trainer.clear()
        self.trainer.ended_ns = time.monotonic_ns()
        return norm

    @property
    def last(self) -> StepResult | None:
        """The result of the last step, also where `loss.backward()` ran it; None before it.

        For `pc.log` and `pc.metrics`.
        """
        return self.trainer.last

    def _clip(self, norms: Norms) -> None:
        """Scales gradients down: by the norms of groups with a `clip`, and that of the rest."""
        groups = self.param_groups
        own = [group.get("clip") for group in groups] + [None]
        if self.clip is None and not any(own):
            return  # without a wait for the other ranks, which may still compute
        factors, of = norms.factors(own, self.clip), self._groups_of_pieces()
        for piece in self._pieces():
            factor = factors[of.get(id(piece.value), len(groups))]
            if piece.value.grad is not None and factor < 1.0:
                piece.value.grad.mul_(factor)

    def grad_norm(self) -> float:
        """The 2-norm of all ranks' gradients; each element counts once."""
        return self._start_norms().total

    def _start_norms(self) -> Norms:
        """Starts to add up the norms of all ranks' gradients, of each group and of what is in none.

        The same all_reduce tells which rank is late.
        """
        return start_norms(self.trainer, self._groups_of_pieces(), len(self.param_groups))

    def _groups_of_pieces(self) -> dict[int, int]:
        """Numbers of the groups, by the ids of the pieces' values."""
        return {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}

    @contextmanager
    def mean_weights(self) -> Iterator[None]:
        """Within, the model has the mean of the replicas' weights: to evaluate or save. Collective.

        Replicas differ if `parallelize` was given `replicas=`; otherwise nothing changes.
        """
        of_replicas: Any = getattr(self.inner, "mean_weights", nullcontext)
        with of_replicas():
            self.trainer.reducer.publish()
            yield
        self.trainer.reducer.publish()

    def meet(self) -> None:
        """Gives all replicas one set of weights, if they differ (`replicas=`). Collective.

        Cost: an all_reduce of the weights, or a pull; nothing for replicas that do not differ.
        """
        of_replicas: Any = getattr(self.inner, "meet", None)
        if of_replicas is not None:
            of_replicas()
            self.trainer.reducer.publish()

    def close(self) -> None:
        """Ends what replicas exchange in the background, after the last step. Collective."""
        of_replicas: Any = getattr(self.inner, "close", None)
        if of_replicas is not None:
            of_replicas()

    def abort(self, reason: str) -> None:
        """Ends what replicas exchange in the background, without waiting. Not collective.

        Args:
            reason: For the error of ranks that wait for this one.
        """
        of_replicas: Any = getattr(self.inner, "abort", None)
        if of_replicas is not None:
            of_replicas(reason)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; `step` does this too."""
        self.trainer.clear()

    def _pieces(self) -> Iterable[Piece]:
        return self.trainer.reducer.pieces.values()


def optimizer(inner: optim.Optimizer, clip: float | None = None) -> Optimizer:
    """Makes an optimizer of torch step a parallelized model.

    Args:
        inner: A new torch optimizer of `model.parameters()`, in any groups. Where parameters are
            shared out, by tp or ZeRO, its update must be element-wise, as in SGD and AdamW, or
            that of an optimizer of `pc.optim`. If its groups do not say `fused` or `foreach`,
            SGD, Adam, AdamW and Adagrad take torch's fused kernel on the CPU.
        clip: Largest norm of all gradients; larger gradients are scaled down to it. A group with a
            "clip" of its own, `{"params": ..., "clip": 0.5}`, is scaled by its norm alone, and the
            others by their common norm.

    Returns:
        The optimizer; call its `step()` after each `model.step(...)`, or `loss.backward()`.

    Raises:
        UsageError: The parameters do not belong to a parallelized model, it has stepped, or its
            update is not element-wise and parameters are shared out.
    """
    return Optimizer(inner, clip)


__all__ = ["Optimizer", "optimizer"]
