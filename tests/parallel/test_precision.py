"""Mixed precision: the curve of float32, the same on every layout, and steps that all skip."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import assert_refused, in_one_world
from tiny_gpt import GPT, PLAN, batches
from torch import nn

from pycoll import parallel as pc
from pycoll import run_ranks

VOCAB, LENGTH = 64, 16


def pattern(steps: int, size: int):
    """Sequences that count upwards by a step of their own, with some noise: they can be learned."""
    random = torch.Generator().manual_seed(11)
    for _ in range(steps):
        first = torch.randint(VOCAB, (size, 1), generator=random)
        by = torch.randint(1, 4, (size, 1), generator=random)
        tokens = (first + by * torch.arange(LENGTH + 1)) % VOCAB
        noise = torch.rand(tokens.shape, generator=random) < 0.1
        tokens = torch.where(noise, torch.randint(VOCAB, tokens.shape, generator=random), tokens)
        yield tokens[:, :-1], tokens[:, 1:]


def curve(comm, sizes, precision, steps, **options):
    """Losses, and the dtypes of what the rank has."""
    torch.set_default_dtype(torch.float32)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(vocab=VOCAB, dim=32, depth=2, heads=4, drop=0.0, context=LENGTH, fused=True)
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", precision=precision, **options)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), clip=1.0)
    losses = []
    for x, y in pc.shard(pattern(steps, 8), mesh):
        losses.append(model.step(x, y, loss=pc.cross_entropy, microbatches=2).loss)
        optimizer.step()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    stepped = {piece.value.dtype for piece in optimizer.trainer.reducer.pieces.values()}
    whole = None if mesh.size("pp") > 1 else model(x).dtype
    mesh.close()
    return losses, dtypes, stepped, whole


def off(one, other) -> float:
    """Largest relative difference of the curves, each smoothed over 10 steps."""
    pairs = zip(
        *(torch.tensor(x).unfold(0, 10, 5).mean(-1).tolist() for x in (one, other)), strict=True
    )
    return max(abs(a / b - 1) for a, b in pairs)


def test_bf16_trains_with_norms_sums_and_losses_in_float32():
    """Twenty steps on one rank and on two."""
    expected = run_ranks(curve, 1, {}, "fp32", 20)[0][0]
    alone = run_ranks(curve, 1, {}, "bf16", 20)[0]
    assert 0 < off(expected, alone[0]) < 0.01
    cases = [(2, {"dp": 2}, "bf16", 20), (2, {"tp": 2}, "bf16", 20)]
    for of_ranks in [[alone], *in_one_world(curve, cases)]:
        for losses, dtypes, stepped, whole in of_ranks:
            assert off(alone[0], losses) < 0.005
            assert stepped == {torch.float32} and whole == torch.float32
            for name, dtype in dtypes.items():
                assert dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bf16_has_the_curve_of_float32_on_every_layout():
    """200 steps: within 1 % of float32, and within 1 % of each other."""
    expected = run_ranks(curve, 1, {}, "fp32", 200)[0][0]
    alone = run_ranks(curve, 1, {}, "bf16", 200)[0][0]
    assert expected[-1] < expected[0] / 2
    layouts = [
        ({"dp": 2}, {}),
        ({"dp": 2}, {"zero": 3}),
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"cp": 2}, {"zero": 2}),
        ({"pp": 2}, {"recompute": "full"}),
    ]
    found = {"alone": alone}
    for sizes, options in layouts:
        found[f"{sizes} {options}"] = run_ranks(curve, 2, sizes, "bf16", 200, **options)[0][0]
    errors = {name: (off(expected, losses), off(alone, losses)) for name, losses in found.items()}
    print(errors)
    assert all(of_float32 < 0.01 and of_one < 0.01 for of_float32, of_one in errors.values()), (
        errors
    )


def under_autocast(comm, sizes, **options):
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(vocab=101, drop=0.0, fused=True)
    model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", **options)
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for x, y in pc.shard(batches(3, 8, vocab=101), mesh):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model.step(x, y, loss=pc.cross_entropy, microbatches=2).loss)
        optimizer.step()
    mesh.close()
    return losses


@pytest.mark.slow
def test_autocast_gives_the_same_losses_on_every_layout():
    expected = run_ranks(under_autocast, 1, {})[0]
    cases = [
        ({"dp": 2}, {"zero": 3}), ({"tp": 2}, {"sequence_parallel": True}), ({"cp": 2}, {}),
        ({"pp": 2}, {}), ({"dp": 2}, {"recompute": "full"}),
    ]  # fmt: skip
    for sizes, options in cases:
        for losses in run_ranks(under_autocast, 2, sizes, **options):
            assert losses == pytest.approx(expected, abs=2e-3), (sizes, options)


def overflow(comm, sizes, zero):
    """In step 1 a gradient of rank 0 alone is infinite."""
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=3):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    plan = {"0": "gather", "2": "vocab"}
    model = pc.parallelize(model, mesh, tp=plan, zero=zero, precision="fp16")
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0)
    scaler = pc.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    bad = [False]
    model[0].weight.register_hook(lambda g: g * torch.inf if bad[0] and comm.rank == 0 else g)
    random = torch.Generator().manual_seed(0)
    found = []
    for step in range(4):
        before = pc.whole_weights(model)
        bad[0] = step == 1
        x, y = torch.randn(4, 8, generator=random), torch.randint(4, (4,), generator=random)
        out = model.step(x, y, loss=pc.cross_entropy, scaler=scaler)
        optimizer.step()
        after = pc.whole_weights(model)
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        finite = all(bool(w.isfinite().all()) for w in after.values())
        found.append((out.skipped, len(moved), finite, scaler.get_scale()))
        assert pc.metrics(out)["skipped"] == out.skipped
    mesh.close()
    return found, out.grad_norm


def overflow_of_one_replica(comm, replicas):
    """In step 1 a gradient of rank 0 alone is infinite. Returns who skipped, and the mean."""
    mesh = pc.mesh(dp=comm.size, comm=comm)
    torch.manual_seed(comm.rank)
    model = pc.parallelize(nn.Linear(4, 4), mesh, replicas=replicas, precision="fp16")
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = pc.GradScaler("cpu", init_scale=1024.0)
    bad = [False]
    model.weight.register_hook(lambda g: g * torch.inf if bad[0] and comm.rank == 0 else g)
    skipped = []
    for step in range(4):
        bad[0] = step == 1
        x, y = torch.randn(4 * comm.size, 4), torch.randint(4, (4 * comm.size,))
        out = model.step(x, y, loss=pc.cross_entropy, scaler=scaler)
        optimizer.step()
        skipped.append(out.skipped)
    with optimizer.mean_weights():
        mean = model.weight.detach().clone()
    mesh.close()
    return skipped, mean


def test_a_replica_that_skips_a_step_exchanges_with_the_others_all_the_same():
    kinds = ["gossip", "gossip:mode=sgp", "local:steps=2", "ps"]
    for kind, of_ranks in zip(
        kinds, in_one_world(overflow_of_one_replica, [(2, kind) for kind in kinds]), strict=True
    ):
        (first, mean), (second, other) = of_ranks
        assert first == [False, True, False, False] and second == [False] * 4, kind
        assert mean.isfinite().all() and torch.allclose(mean, other), kind


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    cases = [(2, {"dp": 2}, 1), (2, {"tp": 2}, 0), (1, {}, 0)]
    for case, of_ranks in zip(cases, in_one_world(overflow, cases), strict=True):
        for found, _ in of_ranks:
            skipped, moved, finite, scales = zip(*found, strict=True)
            assert skipped == (False, True, False, False), case
            assert moved == (6, 0, 6, 6) and all(finite), case
            assert scales == (1024.0, 512.0, 512.0, 1024.0), case


def gradients(comm, scale):
    mesh = pc.mesh(dp=-1, comm=comm)
    torch.manual_seed(0)
    model = pc.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), mesh)
    scaler = None if scale is None else pc.GradScaler("cpu", init_scale=scale)
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    with model.no_sync():
        model.step(x, y, loss=pc.cross_entropy, scaler=scaler)
    model.step(x, y, loss=pc.cross_entropy, microbatches=2, scaler=scaler)
    found = pc.whole_gradients(model)
    mesh.close()
    return found


def test_scaled_gradients_are_those_without_a_scale():
    """A power of two changes no bit, also with accumulation."""
    plain, scaled = in_one_world(gradients, [(2, None), (2, 4096.0)])
    for one, other in zip(plain, scaled, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def short_sums(comm):
    """Bytes of gradients of a model without norms, by dtype of the sums."""
    found = []
    for reduce in (torch.float32, torch.bfloat16):
        mesh = pc.mesh(dp=-1, comm=comm)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False))
        model = pc.parallelize(model, mesh, precision=pc.Precision(torch.bfloat16, reduce=reduce))
        optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.step(torch.ones(2, 64), torch.zeros(2).long(), loss=pc.cross_entropy)
        assert {p.value.grad.dtype for p in optimizer.trainer.reducer.pieces.values()} == {
            torch.float32
        }
        optimizer.step()
        weight = sum(p.numel() for p in model.parameters())
        small = 64  # bytes of the mean and the marks of used parameters
        found.append(round((mesh.ledger.entries["dp", "all_reduce"].nbytes - small) / weight))
        mesh.close()
    return found


def test_sums_of_gradients_may_be_short():
    assert run_ranks(short_sums, 2) == [[4, 2]] * 2


def test_a_model_on_meta_has_the_same_bits():
    def weights(device):
        with torch.device(device), pc.keyed_init(seed=1):
            model = GPT(depth=1)
        pc.parallelize(model, pc.mesh(dp=1), precision="bf16", zero=1)
        return dict(model.named_parameters())

    def work(comm):
        one, other = weights("cpu"), weights("meta")
        assert one["head.weight"].dtype == torch.bfloat16
        return all(torch.equal(one[name], other[name]) for name in one)

    assert run_ranks(work, 1) == [True]


@pytest.mark.pure
def test_memory_knows_the_precision():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16))
    full, short = (pc.memory(model, {"dp": 1}, precision=of)[0] for of in (None, "bf16"))
    assert full.parameters == 4 * (256 + 32)
    assert short.parameters == 6 * 256 + 4 * 32 and short.gradients == full.gradients


def test_other_precisions_are_refused():
    def of(precision):
        return lambda mesh: pc.parallelize(nn.Linear(2, 2), mesh, precision=precision)

    def pipelined(mesh):
        model = pc.parallelize(GPT(depth=2), mesh, pp="blocks", schedule="pipedream")
        pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = next(batches(1, 4))
        model.step(x, y, loss=pc.cross_entropy, scaler=pc.GradScaler("cpu"))

    assert_refused(
        {
            "precision is 'half', expected 'bf16', 'fp16', 'fp32', 'fp8' or pc.": of("half"),
            "a scaler needs sums over all stages at once": pipelined,
        },
        dp=1,
    )
