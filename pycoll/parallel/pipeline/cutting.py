"""Cuts a plain model into stages at its list of blocks, in place; parameters keep their names.

The model's own forward runs on every stage. Blank tensors of the right shapes replace the outputs
of modules before a stage's first block. At the first block, the hidden state of the previous stage
replaces the blank one; at the block behind the last one the run ends. So masks, positions and flags
that the model computes from its inputs are right on every stage, without a change to its code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pycoll.errors import UsageError
from pycoll.parallel.core.specs import replace
from pycoll.parallel.pipeline.parts import Absent, Part, Reached, Role, Run, install
from pycoll.parallel.pipeline.split import split
from pycoll.parallel.pipeline.stages import Notes, Tensors


class Cut:
    """A model with only the stages of this rank. Made by `cut`.

    Attributes:
        model: The model itself.
        bounds: The first block of each stage, and the number of blocks.
        shared: Parameters that several stages have, by their first name, with these stages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        blocks: str,
        bounds: Sequence[int],
        local: Iterable[int],
        both: Collection[str] = (),
    ) -> None:
        self.model = model
        self.bounds = tuple(bounds)
        self.local_stages = tuple(sorted(local))
        self._blocks = blocks
        self._names = _block_names(model, blocks)
        self._owners = _owners(model, blocks, self.bounds, both)
        first_names = [name for name, _ in model.named_parameters()]
        self.shared = {n: self._owners[n] for n in first_names if len(self._owners[n]) > 1}
        self._shared_here = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in self.shared and set(self.shared[name]) & set(self.local_stages)
        }
        self._running: Run | None = None
        self._place_parts(both)

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    def parameters_of(self, stage: int) -> dict[str, torch.nn.Parameter]:
        here = self.model.named_parameters()
        return {name: parameter for name, parameter in here if stage in self._owners[name]}

    def own(self, stage: int) -> set[str]:
        """The names of the parameters that this stage alone has."""
        return self.parameters_of(stage).keys() - self.shared

    def shared_parameter(self, name: str) -> torch.nn.Parameter:
        return self._shared_here[name]

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter in sums over the model's parameters."""
        return min(self._owners[name]) in self.local_stages

    def forward(
        self,
        stage: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: Tensors | None,
        notes: Notes,
        replaced: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        if not args and not kwargs:
            raise UsageError(
                f"stage {stage} has no inputs: give every rank of the pipeline the same batch "
                "(stages behind the first one compute masks and positions from it)"
            )
        first, end = self.bounds[stage], self.bounds[stage + 1]
        self._running = Run(first, end, len(self._names), hidden, notes)
        try:
            if replaced is None:
                output = self.model(*args, **kwargs)
            else:
                output = torch.func.functional_call(self.model, dict(replaced), args, kwargs)
        except Reached as reached:
            output = reached
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise _elsewhere(stage) from error
        finally:
            run, self._running = self._running, None
        if isinstance(output, Reached):
            return _real(stage, (output.hidden,))
        if run.position < len(self._names):
            raise UsageError(
                f"the forward of {type(self.model).__name__} went through {run.position} of the "
                f"{len(self._names)} blocks of {self._blocks!r}: expected all, in their order"
            )
        return _real(stage, output)

    @property
    def running(self) -> Run | None:
        """The run in progress; None outside `forward`."""
        return self._running

    @property
    def stands_in(self) -> bool:
        """Whether a run is before its own blocks, where modules return blanks."""
        run = self._running
        return run is not None and run.first > 0 and run.position <= run.first

    def _place_parts(self, both: Collection[str]) -> None:
        """Installs or removes every block, and every module with weights beside the blocks."""
        last = self.num_stages - 1
        before, after = _beside(self.model, self._blocks)
        parts = [(name, Part.BEFORE, -1, {0, last} if name in both else {0}) for name in before]
        parts += [(name, Part.AFTER, -1, {last}) for name in after]
        for stage in range(self.num_stages):
            for i in range(self.bounds[stage], self.bounds[stage + 1]):
                parts.append((self._names[i], Part.BLOCK, i, {stage}))
        here = [name for name, _, _, stages in parts if stages & set(self.local_stages)]
        # Modules may be shared: modules of local parts stay intact within absent parts, too.
        keep = {id(m) for name in here for m in self.model.get_submodule(name).modules()}
        for name, part, index, _ in parts:
            parent_name, _, child = name.rpartition(".")
            parent = self.model.get_submodule(parent_name)
            module = parent._modules[child]
            assert module is not None
            role = Role(self, part, [index], name)
            if id(module) in keep:
                install(module, role)
            else:
                parent._modules[child] = Absent(module, role, keep)

    def __repr__(self) -> str:
        name = type(self.model).__name__
        return f"<Cut of {name} at {list(self.bounds)}, here stages {list(self.local_stages)}>"


def _real(stage: int, output: Any) -> Any:
    """Returns a stage's output, if it has values."""

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            raise _elsewhere(stage)
        return tensor

    replace(output, torch.Tensor, look)
    return output


def _elsewhere(stage: int) -> UsageError:
    return UsageError(
        f"stage {stage} uses weights that are on another stage. A module before the blocks whose "
        "weights are used after them, too, must be named in both=[...]"
    )


def cut(
    model: torch.nn.Module,
    blocks: str,
    num_stages: int,
    local_stages: Iterable[int],
    costs: Sequence[float] | None = None,
    before: float = 0.0,
    after: float = 0.0,
    both: Collection[str] = (),
) -> Cut:
    """Cuts a model into stages at its list of blocks, in place.

    Modules of other stages are removed: `model.named_parameters()` lists the parameters here, under
    their old names. Modules registered before the blocks belong to the first stage, modules
    registered after them to the last one; modules without parameters stay on every stage.

    Args:
        model: Any module whose forward goes through its blocks once, in order.
        blocks: The name of the ModuleList, ModuleDict or Sequential of blocks, such as
            "transformer.h"; "" if the model itself is the list.
        num_stages: Number of stages of the whole pipeline.
        local_stages: The stages of this rank.
        costs: Cost of each block, measured or counted; stages are cut as evenly as possible. None:
            the number of its parameters.
        before: Cost of the modules before the blocks.
        after: Cost of the modules after the blocks.
        both: Names of modules before the blocks whose weights the model also uses after them: they
            stay on the last stage too. Parameters that two modules share need not be listed.

    Returns:
        The stages, for PipelineRuntime.

    Raises:
        UsageError: The list does not exist, or the number of blocks is below that of stages or
            differs from that of costs.

    Cost: nothing is copied.
    """
    names = _block_names(model, blocks)
    if costs is None:
        costs = [
            float(1 + sum(p.numel() for p in model.get_submodule(n).parameters())) for n in names
        ]
    if len(costs) != len(names):
        raise UsageError(
            f"costs has {len(costs)} values, expected {len(names)}: one per block of {blocks!r}"
        )
    return Cut(model, blocks, split(costs, num_stages, before, after), local_stages, both)


def _block_names(model: torch.nn.Module, blocks: str) -> list[str]:
    try:
        container = model.get_submodule(blocks)
    except AttributeError:
        container = None
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    if not isinstance(container, lists):
        there = [
            name or '""' for name, module in model.named_modules() if isinstance(module, lists)
        ]
        raise UsageError(
            f"{type(model).__name__} has no list of blocks {blocks!r}: expected the name of a "
            f"ModuleList, ModuleDict or Sequential; there are {', '.join(there) or 'none'}"
        )
    prefix = f"{blocks}." if blocks else ""
    return [prefix + name for name in container._modules]


def _ancestors(blocks: str) -> Iterator[tuple[str, str]]:
    """Modules that contain the list of blocks, outermost first: their names and the next name."""
    parts = blocks.split(".") if blocks else []
    for i, part in enumerate(parts):
        yield ".".join(parts[:i]), part


def _beside(model: torch.nn.Module, blocks: str) -> tuple[list[str], list[str]]:
    """Modules with parameters that are registered before and after the blocks."""
    before: list[str] = []
    after: list[str] = []
    for name, towards in _ancestors(blocks):
        side = before
        for child, module in model.get_submodule(name).named_children():
            if child == towards:
                side = after
            elif next(module.parameters(), None) is not None:
                side.append(f"{name}.{child}" if name else child)
    return before, after


def _owners(
    model: torch.nn.Module, blocks: str, bounds: Sequence[int], both: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """The stages that have each parameter, by the parameter's first name."""
    last = len(bounds) - 2
    block_names = _block_names(model, blocks)
    places: dict[str, Iterable[int]] = {}
    for stage in range(last + 1):
        for i in range(bounds[stage], bounds[stage + 1]):
            places[block_names[i]] = (stage,)
    before, after = _beside(model, blocks)
    if unknown := set(both) - set(before):
        raise UsageError(f"both names {sorted(unknown)}, expected some of {before}")
    places |= dict.fromkeys(before, (0,)) | dict.fromkeys(after, (last,))
    places |= dict.fromkeys(both, (0, last))
    owners: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # A parameter of no part belongs to a module around the blocks, which runs on every stage.
        at = next((at for part, at in places.items() if name.startswith(f"{part}.")), None)
        owners.setdefault(id(parameter), set()).update(range(last + 1) if at is None else at)
    return {
        name: tuple(sorted(owners[id(parameter)]))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


__all__ = ["Cut", "cut"]
