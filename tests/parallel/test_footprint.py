"""Memory in bytes of tensors: statements of pc.memory before a run, formulas of the docs."""

from __future__ import annotations

import gc
import math
import warnings
import weakref

import pytest
import torch
from mesh_cases import in_one_world
from tiny_gpt import GPT, PLAN
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pycoll import UsageError
from pycoll import parallel as pc

DEPTH, WIDTH = 40, 64
ITEM = 4  # bytes of a float32
X = torch.zeros(4, 8, dtype=torch.long)


def storages(tensors) -> int:
    """Bytes of the tensors' storages, each once."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(found.values())


class Peak(TorchDispatchMode):
    """The most bytes that the storages of all living tensors had at the end of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref] = {}
        self.nbytes = 0

    def note(self, *tensors) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = weakref.ref(storage)

    def measure(self) -> int:
        self._alive = {key: ref for key, ref in self._alive.items() if ref() is not None}
        return sum(ref().nbytes() for ref in self._alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, result)):
            if isinstance(x, torch.Tensor):
                self.note(x)
        self.nbytes = max(self.nbytes, self.measure())
        return result


def model_for(sizes: dict, dtype: torch.dtype) -> nn.Module:
    # A token goes to two experts: with two of them, each has moments.
    return GPT(fused=True, experts=2 * ("ep" in sizes)).to(dtype)


def kept(comm, sizes: dict, zero: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and moments that a rank has after a step."""
    mesh = pc.mesh(**sizes, comm=comm)
    model = model_for(sizes, dtype)
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", zero=zero, bucket_mb=0.01)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters()))
    ((x, y),) = pc.shard([(X, X)], mesh)
    model.step(x, y, loss=pc.cross_entropy, microbatches=2)
    buckets = optimizer.trainer.reducer.buckets
    sums = [b._gradients if zero < 2 else b._sums for b in buckets]
    weights = [p.data for p in model.parameters()] if zero < 3 else [b._mine for b in buckets]
    weights += [b._master for b in buckets if b._master is not None]
    before = storages(weights), storages(sums)
    optimizer.step()
    state = [v for s in optimizer.inner.state.values() for k, v in s.items() if k != "step"]
    mesh.close()
    return *before, sum(v.nbytes for v in state)


def assert_exact(layouts: list[dict], zeros: dict[torch.dtype, tuple]) -> None:
    cases = [
        (math.prod(sizes.values()), sizes, zero, dtype)
        for sizes in layouts
        for dtype, levels in zeros.items()
        for zero in levels
    ]
    for case, found in zip(cases, in_one_world(kept, cases), strict=True):
        _, sizes, zero, dtype = case
        options = {"zero": zero, "bucket_mb": 0.01, "microbatches": 2}
        stated = pc.memory(model_for(sizes, dtype), sizes, tp=PLAN, pp="blocks", **options)
        assert [(r.parameters, r.gradients, r.optimizer) for r in stated] == found, case


def test_weights_gradients_and_moments_are_exact():
    assert_exact([{"dp": 2, "tp": 2}], {torch.float32: (0, 1, 2, 3), torch.bfloat16: (0, 3)})


@pytest.mark.slow
def test_weights_gradients_and_moments_are_exact_on_every_axis():
    layouts = [
        {"dp": 3},
        {"pp": 2, "dp": 2},
        {"pp": 2, "dp": 2, "tp": 2},
        {"dp": 2, "cp": 2, "tp": 2},
        {"dp": 2, "ep": 2, "tp": 2},
    ]
    assert_exact(layouts, {torch.float32: (0, 1, 2, 3), torch.bfloat16: (0, 3)})


def waiting(comm, sizes: dict, options: dict) -> int:
    """Bytes that live between a forward and its backward, beside weights and input.

    As in `model.step`, where outputs are not gathered.
    """
    mesh = pc.mesh(dp=1, **sizes, comm=comm)
    model = GPT(dim=32, depth=2, fused="cp" in sizes)
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    trainer = pc.trainer_of(model)
    with Peak() as living, trainer.within_step():
        y = trainer.sequence.take(X) if "cp" in sizes else X
        total, _ = pc.cross_entropy(model(X), y)
        gc.collect()
        nbytes = living.measure()
    known = storages([X, y, *(p.data for p in model.parameters())])
    return nbytes - known


@pytest.mark.slow
def test_activations_are_within_5_percent():
    cases = [
        (1, {"tp": 1}, {}),
        (2, {"tp": 2}, {}),
        (2, {"tp": 2}, {"sequence_parallel": True}),
        (2, {"tp": 2}, {"recompute": "full"}),
        (1, {"tp": 1}, {"recompute": "selective"}),
        (2, {"tp": 2}, {"recompute": "selective", "sequence_parallel": True}),
        (2, {"tp": 2}, {"recompute": "*.up"}),
        (1, {"tp": 1}, {"recompute": pc.Keep(("aten.bmm", "aten._softmax"), "blocks.1")}),
        (2, {"cp": 2}, {}),
        (4, {"cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ]
    for case, found in zip(cases, in_one_world(waiting, cases), strict=True):
        _, sizes, options = case
        model = GPT(dim=32, depth=2, fused="cp" in sizes)
        args = {"x": X, "y": X, "loss": pc.cross_entropy, **options}
        stated = pc.memory(model, sizes, tp=PLAN, pp="blocks", **args)
        assert [rank.activations for rank in stated] == pytest.approx(found, rel=0.05), case


@pytest.mark.pure
def test_stages_keep_what_the_whole_model_keeps_for_as_many_microbatches_as_wait():
    def ask(pp, **options):
        ranks = pc.memory(GPT(), {"pp": pp}, pp="blocks", x=X, microbatches=4, **options)
        return [rank.activations for rank in ranks]

    (whole,) = ask(1)
    first, last = ask(2)  # 1F1B: two microbatches wait on the first stage, one on the last
    assert first / 2 + last == pytest.approx(whole, rel=0.02)
    all_wait = ask(2, schedule="gpipe")
    assert all_wait == [2 * first, 4 * last]


@pytest.mark.pure
def test_a_model_that_no_machine_holds():
    """1e11 parameters in float32: 400 GB of weights, and as many of gradients."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(10)))
    (alone,) = pc.memory(model, {})
    assert (alone.parameters, alone.gradients, alone.optimizer) == (4e11, 4e11, 8e11)
    shares = pc.memory(model, {"dp": 64}, zero=3)
    assert {rank.total for rank in shares} == {16e11 / 64}


@pytest.mark.pure
def test_pipedream_keeps_versions_of_the_weights():
    """Stage s keeps p - s versions beside the newest; with vertical sync p; with 2BW two."""
    versions = {
        "pipedream": lambda stage: 4 - stage,
        "pipedream_vertical_sync": lambda stage: 4,
        "pipedream_2bw": lambda stage: 2,
    }
    flush, *others = (
        pc.memory(GPT(), {"pp": 4}, pp="blocks", schedule=name, microbatches=12)
        for name in ("1f1b", *versions)
    )
    for number, stashed in zip(versions.values(), others, strict=True):
        for stage, (one, other) in enumerate(zip(flush, stashed, strict=True)):
            assert other.parameters == one.parameters * (1 + number(stage))
            assert (other.gradients, other.optimizer) == (one.gradients, one.optimizer)


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="needs the name of the list of blocks"):
        pc.memory(GPT(), {"pp": 2})
    with pytest.raises(UsageError, match="expected sizes of pp, dp, "):
        pc.memory(GPT(), {"xp": 2})
    with pytest.raises(UsageError, match="matches no layer"):
        pc.memory(GPT(), {"tp": 2}, tp={"nothing": "col"})


def peak(comm, zero: int) -> tuple[int, int]:
    """Peak of one step with Adam after a first one; and the number of parameters."""
    warnings.simplefilter("error")  # torch's about hooks of modules whose inputs need no gradient
    mesh = pc.mesh(comm=comm)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    count = sum(p.numel() for p in model.parameters())
    model = pc.parallelize(model, mesh, zero=zero, bucket_mb=WIDTH * WIDTH * ITEM / 2**20)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), foreach=False))
    x = torch.randn(1, WIDTH)

    def step() -> None:
        model.step(x, x, loss=nn.functional.mse_loss)
        optimizer.step()

    step()
    gc.collect()
    with Peak() as found:
        step()
    return found.nbytes, count


def test_peak_is_within_5_percent_of_the_formula():
    """float32, Adam: parameters, gradients and two moments, 4 bytes of each, psi elements."""
    formulas = {
        0: lambda psi, n: 16 * psi,
        1: lambda psi, n: 8 * psi + 8 * psi / n,
        2: lambda psi, n: 4 * psi + 12 * psi / n,
        3: lambda psi, n: 16 * psi / n,
    }
    cases = [(2, 0), (4, 1), (2, 2), (2, 3)]
    for (n, zero), found in zip(cases, in_one_world(peak, cases), strict=True):
        for nbytes, count in found:
            share = nbytes / formulas[zero](count, n)
            assert 0.95 <= share <= 1.05, f"ZeRO {zero}, {n} replicas: {share:.3f} of the formula"
