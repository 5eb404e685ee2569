"""PipeDream in the trainer: the weights of one process whose gradients are as old as is stated."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, PLAN, batches, train  # noqa: E402

from pycoll import UsageError, run_ranks  # noqa: E402
from pycoll import parallel as pc  # noqa: E402
from pycoll.parallel import pipeline  # noqa: E402
from pycoll.parallel.core.placement import share  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

TOLERANCE = 1e-10
DEPTH, STEPS, BATCH, MICROBATCHES = 4, 3, 12, 6
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def made(mesh) -> GPT:
    with pc.keyed_init(mesh, seed=3):
        return GPT(depth=DEPTH, drop=0.0)


def parts(x, dp: int, microbatches: int) -> list:
    """The i-th microbatches of all replicas, together."""
    found: list[list] = [[] for _ in range(microbatches)]
    for replica in range(dp):
        start, stop = share(len(x), dp, replica)
        mine = x[start:stop]
        for i in range(min(microbatches, len(mine))):
            first, end = share(len(mine), min(microbatches, len(mine)), i)
            found[i].append(mine[first:end])
    return [torch.cat(part) for part in found if part]


def reference(mesh, optimizer: str, batch: int, microbatches: int):
    """One process, no pipeline: stage s learns from weights that are min(i, pp - 1 - s) old."""
    dp, pp = mesh.size("dp"), mesh.size("pp")
    model = made(mesh)
    cut = pipeline.cut(made(mesh), "blocks", pp, range(pp))
    stage_of = {name: stage for stage in range(pp) for name in cut.own(stage)}
    steps = OPTIMIZERS[optimizer](model.parameters())
    weights, losses, norms = dict(model.named_parameters()), [], []
    for x, y in batches(STEPS, batch):
        versions, total, tokens = [], 0.0, 0
        of_x, of_y = parts(x, dp, microbatches), parts(y, dp, microbatches)
        for i, (x_part, y_part) in enumerate(zip(of_x, of_y, strict=True)):
            versions.append({name: w.detach().clone() for name, w in weights.items()})
            used = {
                name: versions[i - min(i, pp - 1 - stage)][name].clone().requires_grad_()
                for name, stage in stage_of.items()
            }
            out = torch.func.functional_call(model, used, (x_part,))
            count = int((y_part != -100).sum())
            loss = torch.nn.functional.cross_entropy(
                out.flatten(0, 1), y_part.flatten(), reduction="sum"
            )
            (loss / count).backward()
            for name, weight in weights.items():
                weight.grad = used[name].grad
            norm = torch.cat([w.grad.flatten() for w in weights.values()]).norm()
            steps.step()
            total, tokens = total + float(loss.detach()), tokens + count
        losses.append(total / tokens)
        norms.append(float(norm))
    return losses, norms, {name: w.detach() for name, w in weights.items()}


def trained(mesh, optimizer: str, batch: int, microbatches: int, **options):
    model = pc.parallelize(made(mesh), mesh, tp=PLAN, pp="blocks", schedule="pipedream", **options)
    steps = pc.optimizer(OPTIMIZERS[optimizer](model.parameters()))
    losses, norms = [], []
    for x, y in pc.shard(batches(STEPS, batch), mesh):
        out = model.step(x, y, loss=pc.cross_entropy, microbatches=microbatches)
        norms.append(steps.step())
        losses.append(out.loss)
    return losses, norms, pc.whole_weights(model), (mesh.rank("pp"), out.staleness, out.updates)


def assert_as_stated(
    n: int, sizes: dict, optimizer="adamw", batch=BATCH, microbatches=MICROBATCHES, **options
) -> None:
    def work(comm):
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        mesh = pc.mesh(**sizes, comm=comm)
        arguments = mesh, optimizer, batch, microbatches
        return reference(*arguments) if comm.rank == 0 else None, trained(*arguments, **options)

    pp = sizes["pp"]
    most = len(parts(torch.zeros(batch), n // pp // sizes.get("tp", 1), microbatches))
    found = run_ranks(work, n)
    losses, norms, weights = found[0][0]
    for rank, (_, got) in enumerate(found):
        assert got[0] == pytest.approx(losses, abs=TOLERANCE), rank
        assert got[1] == pytest.approx(norms, abs=TOLERANCE), rank
        assert got[2].keys() == weights.keys()
        for name, weight in weights.items():
            assert (weight - got[2][name]).abs().max() <= TOLERANCE, (rank, name)
        stage, staleness, updates = got[3]
        assert staleness == min(most - 1, pp - 1 - stage)
        assert updates == most


def test_pipedream_trains_as_one_process_with_gradients_as_old_as_stated():
    assert_as_stated(2, {"pp": 2}, "sgd", microbatches=3)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (1, {"pp": 1}),
        (2, {"pp": 1}),
        (4, {"pp": 4}),
        (4, {"pp": 2}),
        (4, {"pp": 2, "tp": 2}),
        (8, {"pp": 2, "tp": 2}),
        (8, {"pp": 4}),
    ],
    ids=str,
)
def test_pipedream_on_every_mesh(n, sizes, optimizer):
    assert_as_stated(n, sizes, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("sizes", [{"pp": 1}, {"pp": 2}], ids=str)
def test_pipedream_with_shares_of_gradients_and_state(sizes, zero):
    assert_as_stated(4, sizes, zero=zero, bucket_mb=0.005)


@pytest.mark.slow
def test_pipedream_with_a_sequence_that_is_shared_out():
    assert_as_stated(4, {"pp": 2, "tp": 2}, sequence_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [7, 5])
@pytest.mark.parametrize(("n", "sizes"), [(4, {"pp": 2}), (3, {"pp": 1}), (6, {"pp": 2})], ids=str)
def test_replicas_with_different_numbers_of_microbatches_take_the_same_updates(n, sizes, batch):
    assert_as_stated(n, sizes, batch=batch)


@pytest.mark.slow
def test_one_microbatch_is_never_stale_and_equals_one_process():
    """With dropout, whose masks go by place."""
    expected = run_ranks(train_unclipped, 1, {}, "1f1b")[0]
    for got in run_ranks(train_unclipped, 4, {"pp": 2, "tp": 2}, "pipedream"):
        assert got[0] == pytest.approx(expected[0], abs=TOLERANCE)
        for name, weight in expected[1].items():
            assert (weight - got[1][name]).abs().max() <= TOLERANCE, name


def train_unclipped(comm, sizes: dict, schedule: str):
    losses, _, weights = train(comm, sizes, steps=5, microbatches=1, schedule=schedule, clip=None)
    return losses, weights


def digits(comm, schedule: str, batch: int, microbatches: int) -> float:
    """Share of the test set that is read right after 8 epochs of updates of 25 samples each."""
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)
    pixels, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes)
    mesh = pc.mesh(pp=4, comm=comm)

    def net():
        layers = [torch.nn.Linear(64, 64) for _ in range(3)] + [torch.nn.Linear(64, 10)]
        modules = [torch.nn.Sequential(torch.nn.ReLU(), layer) for layer in layers]
        return torch.nn.Sequential(*modules)

    with pc.keyed_init(mesh, seed=0):
        model = net()
    model = pc.parallelize(model, mesh, pp="", schedule=schedule)
    steps = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for epoch in range(8):
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(epoch))
        for i in order.split(batch):
            loss = torch.nn.functional.cross_entropy
            model.step(x[i], y[i], loss=loss, microbatches=microbatches)
            steps.step()
    alone = net()
    alone.load_state_dict(pc.whole_weights(model))
    return float((alone(x[1400:]).argmax(1) == y[1400:]).float().mean())


@pytest.mark.slow
def test_digits_are_read_as_well_as_with_a_flush():
    pytest.importorskip("sklearn")
    flush = run_ranks(digits, 4, "1f1b", 25, 1)[0]
    assert flush > 0.85
    assert run_ranks(digits, 4, "pipedream", 200, 8)[0] >= flush - 0.01


def recomputed(mesh):
    pc.parallelize(GPT(), mesh, pp="blocks", schedule="pipedream", recompute=True)


def shared_out(mesh):
    pc.parallelize(GPT(), mesh, pp="blocks", schedule="pipedream", zero=3)


def tied(mesh):
    pc.parallelize(GPT(tie=True), mesh, pp="blocks", schedule="pipedream")


def clipped(mesh):
    model = pc.parallelize(GPT(), mesh, pp="blocks", schedule="pipedream")
    pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0)


def without_optimizer(mesh):
    model = pc.parallelize(GPT(), mesh, pp="blocks", schedule="pipedream")
    model.step(*next(batches(1, 2)), loss=pc.cross_entropy)


def added_up(mesh):
    model = pc.parallelize(GPT(), mesh, pp="blocks", schedule="pipedream")
    pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with model.no_sync():
        model.step(*next(batches(1, 2)), loss=pc.cross_entropy)


REFUSED = {
    recomputed: "recompute would use weights that schedule 'pipedream' has updated since",
    shared_out: "which zero=3 would share out: take zero=2 or less",
    tied: "they share token.weight: untie them or take a schedule with a flush",
    clipped: "clip needs the gradients of all stages at once",
    without_optimizer: "steps the optimizer within model.step: make it before, by pc.optimizer",
    added_up: "no_sync adds gradients up over steps, and schedule 'pipedream' steps",
}


def test_what_an_update_within_a_step_does_not_go_with_is_one_sentence():
    def work(comm):
        mesh = pc.mesh(pp=2, comm=comm)
        for mistake, message in REFUSED.items():
            with pytest.raises(UsageError) as raised:
                mistake(mesh)
            assert message in str(raised.value), mistake.__name__
            assert "\n" not in str(raised.value)

    run_ranks(work, 2)
