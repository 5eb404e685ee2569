"""Finishing the step of a pipeline of which a rank has ended: other replicas take its work over.

Gradients of replicas whose ranks have all finished their passes are kept. The microbatches of the
others run again, on pipelines of ranks that are left: each stage of a microbatch runs on a rank
that has this stage. Then the gradients are added up as if nothing had happened.

A step is finished or repeated on all ranks: after a failure each says what it was doing, and
replicas take work over only if all of them were in the passes of the same step. So no gradient is
added up before all ranks have finished their passes: a broken sum would destroy what is kept.

Source: Gandhi et al. 2024, "ReCycle", SOSP, section 3 (microbatches of a failed rank run on the
same stage of other replicas); docs/decisions/0105-other-replicas-finish-a-step.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycoll.communicator import Communicator
from pycoll.errors import Error, PeerDiedError, UsageError
from pycoll.parallel.core import parcels
from pycoll.parallel.core.batches import num_samples, split
from pycoll.parallel.core.losses import Loss
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.core.placement import share as share_of
from pycoll.parallel.recovery.laps import Laps
from pycoll.parallel.recovery.survivors import GOES_ON, LOST, Regrouped, survivors
from pycoll.parallel.trainer.executors import Pipelined, Ran
from pycoll.parallel.trainer.passes import Share
from pycoll.parallel.trainer.trainer import Trainer
from pycoll.parallel.trainer.update_policy import UpdatePolicy

Found = tuple[Tensor, Ran]  # what `Passes.run` returns


@dataclass(frozen=True, slots=True)
class Work:
    """What replicas take over.

    Attributes:
        pipelines: The rank of each stage, of pipelines without a common rank.
        sources: By replica whose microbatches run again, a rank that has them.
    """

    pipelines: list[list[int]]
    sources: dict[int, int]


def work_of(doings: Sequence[Mapping[str, Any] | None], num_stages: int) -> Work | None:
    """What the ranks that are left take over.

    Args:
        doings: Of each rank, what `Takeover` says of it; None: it was not in a step's passes.
        num_stages: Number of stages.

    Returns:
        The work; None if the step must be repeated: ranks were in different steps, a stage has no
        rank left, a replica has none, or its batch cannot be sent.
    """
    ranks_of: dict[int, list[int]] = {}  # by replica
    steps = {None if doing is None else doing["step"] for doing in doings}
    if len(steps) != 1 or None in steps:
        return None
    known = [doing for doing in doings if doing is not None]
    for rank, doing in enumerate(known):
        ranks_of.setdefault(doing["replica"], []).append(rank)
    finished = {
        replica
        for replica, ranks in ranks_of.items()
        if len(ranks) == num_stages and all(known[rank]["finished"] for rank in ranks)
    }
    broken = [replica for replica in range(known[0]["replicas"]) if replica not in finished]
    sources = {
        replica: next(rank for rank in ranks_of[replica] if known[rank]["can_send"])
        for replica in broken
        if any(known[rank]["can_send"] for rank in ranks_of.get(replica, ()))
    }
    # Whole replicas first, so that pipelines have ranks that already share one.
    order = sorted(ranks_of, key=lambda replica: (replica not in finished, -len(ranks_of[replica])))
    of_stages = [
        [rank for replica in order for rank in ranks_of[replica] if known[rank]["stage"] == stage]
        for stage in range(num_stages)
    ]
    if len(sources) < len(broken) or not all(of_stages):
        return None
    return Work([list(ranks) for ranks in zip(*of_stages, strict=False)], sources)


class Takeover:
    """Finishes steps of a trainer from which ranks have ended.

    Attributes:
        base: The ranks; after a failure those that are left.
        laps: Times since the failure.
        news: What has happened; empty: nothing.
        has_finished: A step was finished without some ranks; no other step can follow it.
    """

    def __init__(self, base: Communicator, trainer: Trainer) -> None:
        """Takes the place of what passes batches through the model.

        Args:
            base: The ranks.
            trainer: One for which `is_possible`.
        """
        self.base, self.laps, self.news = base, Laps(), ""
        self.has_finished = False
        self._trainer, self._mesh = trainer, trainer.mesh
        self._passes = trainer.run
        self._accumulates = False
        trainer.run = self.run

    @staticmethod
    def is_possible(trainer: Trainer) -> bool:
        """Whether each stage has replicas with the same whole state, and their sum waits for all.

        Gradients of virtual replicas are added up in an order of their own, and batch
        normalization has communicated within the passes.
        """
        mesh, executor = trainer.mesh, trainer.executor
        axes = {axis for axis, size in mesh.sizes.items() if size > 1}
        return (
            axes == {"pp", "dp"}
            and isinstance(executor, Pipelined)
            and not executor.runs_empty
            and trainer.reducer.level == 0
            and type(trainer.policy) is UpdatePolicy
            and mesh.device.type == "cpu"
        )

    def run(self, share: Share, loss: Loss, *, reduce: bool) -> Found:
        """As `Passes.run`; ranks may end meanwhile.

        Raises:
            Regrouped: The step must be repeated.
            PeerDiedError: Ranks have ended in an earlier step, which no commit has followed.
        """
        if self.has_finished:
            raise PeerDiedError(f"{self.news}; steps without a commit are repeated")
        accumulated, self._accumulates = self._accumulates, not reduce
        if accumulated or not reduce:
            return self._passes(share, loss, reduce=reduce)
        found: Found | None = None
        try:
            found = self._passes(share, loss, reduce=False)
            self.base.all_reduce(np.ones(1))  # all ranks have finished
        except LOST as error:
            found = self._without(error, share, loss, found)
        reducer = self._trainer.reducer
        reducer.begin(reduce=True, staged=True)
        reducer.finish()
        return found

    def regrouped(self) -> Regrouped:
        """What leaves the user's loop after the step."""
        self.laps.end("rest of the step")
        return Regrouped(self.base, self.laps, self.news)

    def _without(self, error: Error, share: Share, loss: Loss, found: Found | None) -> Found:
        """What `run` returns on the ranks that are left."""
        self.laps, self.news = Laps(), str(error).split(";")[0]
        if found is None:  # else other stages may still need messages that have been sent
            self._mesh.comm("pp").abort(GOES_ON)
        doing = {
            "step": self._trainer.step_idx,
            "stage": self._mesh.rank("pp"),
            "replica": self._mesh.rank("dp"),
            "replicas": self._mesh.size("dp"),
            "finished": found is not None,
            "can_send": _can_be_sent(share),
        }
        size = self.base.size
        try:
            self.base, doings = survivors(self.base, error, doing, needs_death=True)
        except Error as final:
            raise Regrouped(self.base, self.laps, self.news, final) from None
        self.laps.end("shrink")
        work = work_of(doings, self._mesh.size("pp"))
        if work is None:
            raise Regrouped(self.base, self.laps, self.news)
        self._mesh.go_on_with(self.base, GOES_ON)
        self._share_out_owned()
        if found is None or self._mesh.rank("dp") in work.sources:
            self._forget_gradients()
            found = torch.zeros(1, dtype=torch.float64), Ran()
        found = self._run_again(work, share, loss, found)
        self.has_finished = True
        lost = sorted(set(range(size)) - set(self.base.former_ranks))
        which = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
        self.news = f"{which} of {size} ended within a step, which other replicas have finished"
        self.laps.end("takeover")
        return found

    def _share_out_owned(self) -> None:
        """Gives the parameters that lost ranks own to the first ranks that have them."""
        pieces = self._trainer.reducer.pieces
        mine = [sorted(name for name, of in pieces.items() if of.owned), sorted(pieces)]
        of_ranks = gather_objects(mine, self.base)
        known = {name for owned, _ in of_ranks for name in owned}
        for rank, (_, names) in enumerate(of_ranks):
            for name in set(names) - known:
                known.add(name)
                if rank == self.base.rank:
                    pieces[name].owned = True

    def _forget_gradients(self) -> None:
        self._trainer.reducer.detach()
        for parameter in self._trainer.parameters.values():
            parameter.grad = None

    def _run_again(self, work: Work, share: Share, loss: Loss, found: Found) -> Found:
        """Runs the microbatches of broken replicas, dealt to the pipelines."""
        (sums, ran), executor = found, self._trainer.executor
        assert isinstance(executor, Pipelined)
        groups = [self.base.group(ranks) for ranks in work.pipelines]
        try:
            for source in work.sources.values():
                mine = share.x, share.y, share.microbatches, share.first_sample
                x, y, microbatches, first = parcels.broadcast(mine, source, self.base)
                parts = split(x, y, microbatches)
                for i, group in enumerate(groups):
                    start, stop = share_of(len(parts), len(groups), i)
                    if group is not None:
                        skipped = sum(num_samples(x) for x, _ in parts[:start])
                        more = executor.on(group).run(
                            parts[start:stop], loss, first + skipped, reduce=False
                        )
                        sums += more.loss_sum
                        ran = replace(ran, count=ran.count + more.count)
        except BaseException:
            for group in filter(None, groups):
                group.abort(GOES_ON)
            raise
        finally:
            for group in filter(None, groups):
                group.close()
        return sums, ran


def _can_be_sent(share: Share) -> bool:
    try:
        parcels.check((share.x, share.y), "")
    except UsageError:
        return False
    return True


__all__ = ["Takeover", "Work", "work_of"]
