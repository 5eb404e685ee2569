"""The cost of layouts of one model: one function for every search.

The pieces of a rank are traced, its pipeline is simulated by the simulator of schedules, and its
collectives take the time of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.errors import UsageError
from pycoll.parallel.core.batches import num_samples
from pycoll.parallel.core.specs import replace as replace_tensors
from pycoll.parallel.features.feature import Options
from pycoll.parallel.planner import bounds
from pycoll.parallel.planner.blocks import Shortened, shorten
from pycoll.parallel.planner.layouts import Layout
from pycoll.parallel.planner.network import ALGORITHMS, Network
from pycoll.parallel.planner.pieces import Pieces, Share, check_traceable, measure
from pycoll.parallel.planner.sizes import Cut, Sizes
from pycoll.parallel.planner.step import Prediction, Stage, Step, cut_stages, lasting_bytes
from pycoll.parallel.planner.workers import Workers, usable_workers
from pycoll.topology import Topology


@dataclass(slots=True)
class CostModel:
    """Predicts the cost of layouts of one model; call within `without_values`.

    Attributes:
        model: The plain model.
        x: The batch of a step of all replicas.
        y: Its targets, for `loss`.
        loss: As in `step`.
        tp: Plan of tensor parallelism.
        blocks: Name of the list of blocks, or None.
        cluster: The cluster, with a device.
        precision: As in `parallelize`.
        moments: Numbers that the optimizer keeps per parameter.
        algorithms: Algorithms of collectives.
        overlap: Whether a rank computes while its gradients are reduced and while messages between
            stages travel; `parallelize` does, Megatron-LM of 2021 did not.
        prefetch: Whether ZeRO 3 gathers while it computes; `parallelize` does not.
        even: Whether all stages have equally many blocks, as Megatron-LM's; `parallelize` cuts so
            that the slowest stage is as fast as possible.
    """

    model: nn.Module
    x: Any
    cluster: Topology
    y: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    tp: dict[str, Any] = field(default_factory=dict)
    blocks: str | None = None
    precision: Any = None
    moments: int = 2
    algorithms: tuple[str, ...] = ALGORITHMS
    overlap: bool = True
    prefetch: bool = False
    even: bool = False
    _pieces: dict[tuple[Cut, int], Pieces | UsageError] = field(default_factory=dict)
    _networks: dict[tuple[int, ...], Network] = field(default_factory=dict)
    _stages: dict[Any, tuple[list[Stage], list[float] | None]] = field(default_factory=dict)
    _passes: dict[Any, bounds.Passes] = field(default_factory=dict)
    _sizes: Sizes = field(default_factory=Sizes)
    _short: Shortened = field(init=False)
    _workers: Workers[tuple[Cut, int], Share] = field(init=False)

    def __post_init__(self) -> None:
        self._short = shorten(self.model, self.blocks)
        self._workers = Workers(self._trace, 0)

    @property
    def batch(self) -> int:
        """Number of samples of a step."""
        return num_samples(self.x)

    @property
    def num_blocks(self) -> int:
        return len(list(self.model.get_submodule(self.blocks).children())) if self.blocks else 0

    def pieces(self, layout: Layout) -> Pieces:
        """The pieces of a rank's part.

        Raises:
            UsageError: The model cannot be shared out like this.
        """
        key = self._share_of(layout)
        if key not in self._pieces:
            try:
                self._pieces[key] = self._measured(layout, key[1])
            except UsageError as error:
                self._pieces[key] = error
        found = self._pieces[key]
        if isinstance(found, UsageError):
            raise found
        return found

    def sample(self, size: int) -> Any:
        """A microbatch of some samples."""
        return self._part(self.x, size)

    @staticmethod
    def _part(batch: Any, size: int) -> Any:
        def part(tensor: Tensor) -> Tensor:
            return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)

        return replace_tensors(batch, Tensor, part)

    def check(self) -> None:
        """Checks that the model runs without values.

        Raises:
            UsageError: It does not; the message names the last operator.
        """
        check_traceable(self._short.model, self.sample(1))

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Within it other processes trace the shares that layouts are expected to need."""
        with Workers(self._trace, usable_workers()) as self._workers:
            yield

    def expect(self, layouts: Iterable[Layout]) -> None:
        """Says whose pieces will be asked for next, in this order; `workers` trace them ahead."""
        asked = (key for key in map(self._share_of, layouts) if key not in self._pieces)
        self._workers.expect(self._sizes.expected(asked))

    def _share_of(self, layout: Layout) -> tuple[Cut, int]:
        """How the model is cut, and the samples of a microbatch."""
        options = layout.sequence_parallel, layout.recompute
        size = self.batch // layout.replicas // layout.microbatches
        return Cut(layout.tp, layout.cp, layout.ep, *options), size

    def _measured(self, layout: Layout, size: int) -> Pieces:
        cut, _ = self._share_of(layout)
        share = self._sizes.share(cut, size, lambda: self._workers.take((cut, size)))
        device = self.cluster.device
        assert device is not None
        return share.pieces(self._short.kinds, device)

    def _trace(self, share: tuple[Cut, int]) -> Share:
        cut, size = share
        options = Options(
            tp=self.tp,
            pp=self.blocks,
            schedule="1f1b",
            zero=0,
            sequence_parallel=cut.sequence_parallel,
            recompute=cut.recompute,
            costs=None,
            precision=self.precision,
        )
        sizes = {"tp": cut.tp, "cp": cut.cp, "ep": cut.ep}
        x, y = self.sample(size), self._part(self.y, size)
        return measure(self._short, x, options, sizes, y=y, loss=self.loss)

    def predict(self, layout: Layout) -> Prediction:
        """Predicts the cost of a step.

        Raises:
            UsageError: The model cannot be shared out like this; the message says why.

        Cost: a tenth of a second for sizes of tp, cp and microbatches that are new; else
            milliseconds.
        """
        return self._step(layout).prediction()

    def untraced_bound(self, layout: Layout) -> tuple[float, float]:
        """Seconds and bytes that a step needs at least, by the share of a layout without cp.

        Cost: microseconds, and that of `pieces` without cp for new sizes of tp and microbatches.
        """
        without = replace(layout, cp=1)
        try:
            pieces = self.pieces(without)
        except UsageError:  # it may be allowed with cp
            return 0.0, 0.0
        network, device = self._network(layout), self.cluster.device
        assert device is not None
        key = id(pieces), layout.cp
        if key not in self._passes:
            self._passes[key] = bounds.untraced(pieces, layout, network, device)
        seconds = bounds.untraced_s(self._passes[key], layout, len(pieces.blocks))
        every = [pieces.first, *pieces.blocks, pieces.last]
        return seconds, lasting_bytes(every, layout.zero, network, self.moments) / layout.pp

    def bound(self, layout: Layout) -> tuple[float, float]:
        """Seconds and bytes that a step needs at least, by the share of the layout.

        Raises:
            UsageError: As for `predict`.

        Cost: that of `predict`, without the simulation.
        """
        step = self._step(layout)
        return bounds.least_s(step), bounds.least_bytes(step)

    def _network(self, layout: Layout) -> Network:
        sizes = layout.sizes
        key = tuple(sizes.values())
        if key not in self._networks:
            self._networks[key] = Network(self.cluster, sizes, self.algorithms)
        return self._networks[key]

    def _step(self, layout: Layout) -> Step:
        pieces, network = self.pieces(layout), self._network(layout)
        key = id(pieces), id(network), layout.schedule
        if key not in self._stages:
            self._stages[key] = self._cut(pieces, layout, network)
        return Step(self, layout, network, pieces.hidden, *self._stages[key])

    def _cut(
        self, pieces: Pieces, layout: Layout, network: Network
    ) -> tuple[list[Stage], list[float] | None]:
        stages, costs = cut_stages(pieces, layout, network, even=self.even)
        if not self.overlap and layout.pp > 1:
            message_s = network.message_s(pieces.hidden, "pp")
            for stage in {id(stage): stage for stage in stages}.values():
                stage.wait_for(message_s)
        return stages, costs


__all__ = ["CostModel"]
