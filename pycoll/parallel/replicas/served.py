"""Replicas around a parameter server: servers step the weights, replicas push gradients."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim

from pycoll.errors import UsageError
from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.ps.optimizers import MakeOptimizer
from pycoll.parallel.ps.report import Report
from pycoll.parallel.ps.run import Job, start
from pycoll.parallel.ps.tables import DenseTable
from pycoll.parallel.ps.worker import Worker
from pycoll.parallel.replicas.optimizer import ReplicaOptimizer
from pycoll.parallel.trainer.elementwise import is_elementwise


class Served(ReplicaOptimizer):
    """Pushes this replica's gradients to servers, and pulls the weights that they have stepped.

    Some or all replicas are servers, too. They step by an optimizer of the inner one's class and
    options, one for each of its groups; learning rates travel with each push, so schedulers of the
    inner optimizer work. The servers have the optimizers' state. It is copied to the inner
    optimizer where it may be saved, until the next step, and servers begin with what is there.
    """

    def __init__(
        self, inner: optim.Optimizer, group: AxisGroup | None, options: dict[str, Any]
    ) -> None:
        if not is_elementwise(inner):
            raise UsageError(
                f"replicas='ps': {type(inner).__name__} does not step each element by itself, and "
                "servers have parts of tensors: take an optimizer such as SGD or AdamW"
            )
        super().__init__(inner, group)
        self._options = options
        self._job: Job | None = None
        self._tables: list[DenseTable] = []

    @property
    def worker(self) -> Worker:
        """This replica's worker; made at the first step, or by the first call of this. Collective.

        Raises:
            UsageError: The options of the parameter server are wrong.
        """
        if self._job is None:
            groups = self.param_groups
            makers = {f"group {i}": _maker(self.inner, group) for i, group in enumerate(groups)}
            self._job = start(
                self.group.comm,
                optimizer=makers,
                colocated=True,
                ledger=self.group.ledger,
                **self._options,
            )
            # Other replicas may still ask after this one's last use of the optimizer. Where ranks
            # end at different times, `abort` comes first: a garbage collection would wait for them.
            self._at_end = weakref.finalize(self, self._job.close)
        worker = self._job.worker
        assert worker is not None
        if not self._tables:
            self._tables = [
                worker.register(group["params"], f"group {i}", state=self.state)
                for i, group in enumerate(self.param_groups)
            ]
        return worker

    def step_and_exchange(self) -> None:
        """See ReplicaOptimizer."""
        worker = self.worker
        self.state.clear()
        for table, group in zip(self._tables, self.param_groups, strict=True):
            table.rate = group["lr"]
        worker.push()
        worker.clock()
        worker.pull()

    @contextmanager
    def mean_weights(self) -> Iterator[None]:
        """Within, the replica has the servers' weights of this moment; it keeps them."""
        self._pull()
        yield

    def meet(self) -> None:
        """Gives all replicas the servers' weights after all their pushes. See ReplicaOptimizer."""
        _ = self.worker
        self.group.comm.barrier()
        self._pull()

    def report(self) -> Report:
        """What servers and this replica have counted; after the first step, before `close`."""
        return self.worker.report()

    def close(self) -> None:
        """Leaves; a replica that is a server answers the others until they have left, too."""
        if self._job is not None:
            self._job.close()

    def abort(self, reason: str) -> None:
        """See ReplicaOptimizer."""
        if self._job is not None:
            self._at_end.detach()
            self._job.abort(reason)
            self._job = None

    @torch.no_grad()
    def _pull(self) -> None:
        """Pulls the weights, and the state of the servers' optimizers."""
        self.worker.pull()
        self.state.clear()
        for table in self._tables:
            self.state.update(self.worker.optimizer_state(table))


def _maker(inner: optim.Optimizer, group: dict[str, Any]) -> MakeOptimizer:
    """Makes optimizers of one tensor, with the class and the options of a group."""
    kind: Any = type(inner)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in group.items() if name in known and name != "params"}

    def make(tensors: list[Tensor], sparse: bool) -> optim.Optimizer:
        made: optim.Optimizer = kind(tensors, **options)
        return made

    return make


__all__ = ["Served"]
