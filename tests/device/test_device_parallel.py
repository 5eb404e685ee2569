"""The trainers on a device's tensors, beside the same on the CPU; and pycoll's own collectives of
torch's tensors there."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

import marks  # noqa: E402
import torch._dynamo  # noqa: E402, F811 - torch's optimizers import it in each rank: seconds
import torch_emulated  # noqa: E402
from mesh_cases import differences  # noqa: E402
from tiny_gpt import GPT, PLAN, batches  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import pycoll  # noqa: E402
from pycoll import UsageError, run_ranks  # noqa: E402
from pycoll import parallel as pc  # noqa: E402
from pycoll.parallel.core import random  # noqa: E402
from pycoll.parallel.core.transfers import Link, Transfers  # noqa: E402
from pycoll.parallel.features.context.tile import Tile  # noqa: E402
from pycoll.parallel.features.tensor.conv2d import with_halo  # noqa: E402

pytestmark = marks.TRAINERS
TIMEOUT_S = 120


def on_ranks(kind: str, n: int, *works: Any) -> None:
    """Calls each of these with a communicator, on n ranks whose torch has the device."""

    def rank(comm: pycoll.Communicator) -> None:
        if kind == torch_emulated.NAME:
            torch_emulated.install()
        torch.set_num_threads(1)
        comm.deterministic = True  # sums do not depend on where the arrays are
        for work in works:
            work(kind, comm)
            comm.barrier()

    run_ranks(rank, n, timeout_s=TIMEOUT_S)


def collectives_take_torchs_tensors_on_its_streams(kind: str, comm: pycoll.Communicator) -> None:
    mesh = pc.mesh(comm=comm, device=kind)
    rank, n, device = comm.rank, comm.size, mesh.device
    module = torch.get_device_module(kind)
    assert device.index == rank % module.device_count() == module.current_device()
    x = torch.arange(10_000.0, device=device) + rank
    whole = comm.all_gather(x)
    assert whole.device == device and whole.shape == (n * 10_000,)
    assert torch.equal(whole.view(n, -1)[:, 0].cpu(), torch.arange(float(n)))
    comm.all_reduce(x)
    assert torch.equal(x.cpu(), n * torch.arange(10_000.0) + sum(range(n)))
    # A call runs behind what its stream does; works make the current stream wait.
    stream = torch.Stream(device)
    before = module.current_stream()
    torch.accelerator.set_stream(stream)
    for step in range(10):
        y = torch.full((20_000,), float(step), device=device)
        y.mul_(2).add_(rank)
        work = comm.all_reduce(y, async_op=True)
        work.wait()
        y.add_(1)
        assert (y.cpu() == 2 * step * n + sum(range(n)) + 1).all(), step
    stream.synchronize()
    torch.accelerator.set_stream(before)
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
        kept = comm.empty((3, 5), dtype, device)
        assert kept.dtype == dtype and kept.device == device and not kept.any()
        kept[:] = rank + 1
        comm.broadcast(kept, n - 1)
        assert (kept.cpu() == torch.full((3, 5), n).to(dtype)).all()
    with pytest.raises(UsageError, match="x is on device"):
        comm.all_gather(x, torch.empty(n * 10_000))
    mesh.close()


def worlds_of_several_kinds_are_refused(kind: str, comm: pycoll.Communicator) -> None:
    with pytest.raises(UsageError, match=r"rank 0 are on 'cpu', those of rank 1 on"):
        pc.mesh(comm=comm, device=kind if comm.rank else None)
    with pytest.raises(UsageError, match=r"device is 'no', expected 'cpu' or .*\(on rank 1\)"):
        pc.mesh(comm=comm, device="no" if comm.rank == 1 else kind)
    with pytest.raises(UsageError, match="but torch finds"):
        pc.mesh(comm=comm, device=f"{kind}:77")
    mesh = pc.mesh(comm=comm)
    with pytest.raises(UsageError, match=rf"'weight' is on {kind}:0, the mesh is on cpu: leave"):
        pc.parallelize(nn.Linear(2, 2).to(f"{kind}:0"), mesh)
    mesh.close()


def links_keep_the_order_of_their_tensors(kind: str, comm: pycoll.Communicator) -> None:
    mesh = pc.mesh(comm=comm, device=kind)
    transfers = Transfers(comm)
    there, back = Link(0, 1, "a"), Link(1, 0, "a")
    transfers.connect([there, back, Link(0, 1, "b")], str(mesh.device))
    out, into = (there, back) if comm.rank == 0 else (back, there)
    if comm.rank < 2:
        got = [torch.zeros(n, device=mesh.device) for n in (1, 50_000, 0, 7)]
        sent = [torch.full(x.shape, 10.0 * comm.rank + i, device=mesh.device)
                for i, x in enumerate(got)]  # fmt: skip
        works = [transfers.send(out, x) for x in sent]  # both send first
        works += [transfers.receive(into, x) for x in got]
        for work in works:
            work.wait()
        for i, x in enumerate(got):
            assert (x.cpu() == 10.0 * (1 - comm.rank) + i).all()
    transfers.close()
    mesh.close()


def waits_of_a_stream_are_exposed_time(kind: str, comm: pycoll.Communicator) -> None:
    mesh = pc.mesh(dp=comm.size, comm=comm, device=kind)
    group, x = mesh.line("dp"), torch.ones(1000, device=mesh.device)
    group.all_reduce(x)  # makes the links
    before_s, mesh.ledger.spans = mesh.ledger.waited_s, []
    comm.barrier()
    if comm.rank == 1:
        time.sleep(1.5)
    start_ns = time.monotonic_ns()
    group.all_reduce(x)
    took_s = (time.monotonic_ns() - start_ns) / 1e9
    waited_s = mesh.ledger.waited_s - before_s
    if comm.rank == 0:
        assert took_s < 1.2 < waited_s < 60, (took_s, waited_s)  # the stream waits, not the host
        ((name, _, from_ns, to_ns),) = mesh.ledger.spans
        assert name == "all_reduce dp" and abs(from_ns - start_ns) < 0.5e9 < to_ns - from_ns
    mesh.close()


def random_words_are_those_of_the_cpu(kind: str, comm: pycoll.Communicator) -> None:
    device = pc.mesh(comm=comm, device=kind).device
    for start, count in ((0, 1), (3, 10), (1 << 40, 257)):
        words = torch.from_numpy(random.words("s", start, count).astype("int64"))
        assert torch.equal(random.words_on(device, "s", start, count).cpu(), words)
        for drop in (0.0, 0.3, 0.5, 0.9, 1.0):
            masks = [random.keep_mask("m", start, count, drop, torch.device(d)).cpu()
                     for d in (device, "cpu")]  # fmt: skip
            assert torch.equal(*masks), drop


def halos_are_those_of_the_cpu(kind: str, comm: pycoll.Communicator) -> None:
    image = torch.arange(2.0 * 6 * comm.size * 5).view(1, 2, -1, 5)
    found = []
    for place in (None, kind):
        mesh = pc.mesh(tp=comm.size, dp=1, comm=comm, device=place)
        rows = image.chunk(comm.size, 2)[comm.rank].to(mesh.device).requires_grad_()
        made = with_halo(rows, mesh.line("tp"), 2)
        (made * torch.arange(made.numel(), device=mesh.device).view_as(made)).sum().backward()
        found.append((made.detach().cpu(), rows.grad.cpu()))
        mesh.close()
    assert not list(differences(found[0], found[1], 0.0))


# Sizes of the mesh, options of the model, and options of `parallelize`.
CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": -1}, {}, {}),
    "zero 1": ({"dp": -1}, {}, {"zero": 1}),
    "zero 2": ({"dp": -1}, {}, {"zero": 2}),
    "zero 3": ({"dp": -1}, {}, {"zero": 3}),
    "tp": ({"tp": -1, "dp": 1}, {}, {}),
    "sequence parallel": ({"tp": -1, "dp": 1}, {}, {"sequence_parallel": True}),
    "ep": ({"ep": -1, "dp": 1}, {"experts": 4}, {}),
    "cp": ({"cp": -1, "dp": 1}, {"fused": True}, {}),
    "pp": ({"pp": -1, "dp": 1}, {"tie": True}, {}),
    # Long arrays that ranks access directly: all ranks pass the same part of one.
    "dp, long buckets": ({"dp": -1}, {"hidden": 2048}, {}),
    "zero 1, long buckets": ({"dp": -1}, {"hidden": 2048}, {"zero": 1}),
    "LAMB": ({"dp": -1}, {}, {"zero": 3, "optimizer": pc.optim.LAMB}),
    "recompute": ({"dp": -1}, {}, {"zero": 3, "recompute": True}),
    "pipedream": ({"pp": -1, "dp": 1}, {}, {"schedule": "pipedream", "clip": None}),
    "pp zero bubble": ({"pp": -1, "dp": 1}, {}, {"schedule": "zb1p"}),
}
OF_FOUR = {
    **{name: CASES[name] for name in ("dp", "zero 3", "tp", "ep", "cp", "pp")},
    "zero 1, long buckets": CASES["zero 1, long buckets"],
    "dp x tp, zero 3": ({"dp": 2, "tp": 2}, {}, {"zero": 3}),
    "dp x pp": ({"dp": 2, "pp": 2}, {}, {"zero": 1}),
    "cp x ep": ({"cp": 2, "ep": 2, "dp": 1}, {"fused": True, "experts": 4}, {}),
}


def made(case: tuple[Any, ...], comm: pycoll.Communicator, device: str | None) -> Any:
    """A mesh, a model of float64 and its optimizer."""
    sizes, gpt, options = case
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm, device=device)
    with pc.keyed_init(mesh, seed=3):
        model = GPT(dim=8, heads=4, vocab=13, **gpt)
    options = {"tp": PLAN, "pp": "blocks", **options}
    clip = options.pop("clip", 0.5)
    kind = options.pop("optimizer", partial(torch.optim.AdamW, foreach=False))
    model = pc.parallelize(model, mesh, **options)
    return mesh, model, pc.optimizer(kind(model.parameters(), lr=1e-2), clip)


def trained(case: tuple[Any, ...], comm: pycoll.Communicator, device: str | None) -> list[Any]:
    """Losses, norms and weights after steps on a device, which move no tensor to the host."""
    mesh, model, optimizer = made(case, comm, device)
    assert all(p.device == mesh.device for p in model.parameters() if not p.is_meta)
    losses, norms = [], []
    for x, y in pc.shard(batches(2, 8, 8, 13), mesh):
        before = num_host_copies(device)
        out = model.step(x, y, loss=pc.cross_entropy, microbatches=2)
        norms.append(optimizer.step())
        # The norms of LAMB, two for each parameter, can be more than a few numbers.
        may_copy = isinstance(optimizer.inner, pc.optim.LAMB)
        assert num_host_copies(device) - before <= may_copy
        losses.append(out.loss)
    if device is not None:  # announcements are bytes and numbers
        messages = mesh.comm("pp").message_record() + mesh.comm("cp").message_record()
        assert not {message["dtype"] for message in messages} - {"u8", "i64"}
    weights = {name: value.cpu() for name, value in pc.whole_weights(model).items()}
    mesh.close()
    return [losses, norms, weights]


def num_host_copies(device: str | None) -> int:
    if device != torch_emulated.NAME:
        return 0
    count: int = torch.get_device_module(device).num_host_copies()
    return count


def plain_loop_has_the_bits_of_the_cpu(kind: str, comm: pycoll.Communicator) -> None:
    for zero in (0, 3):
        found = []
        for device in (None, kind):
            mesh, model, optimizer = made(({"dp": -1}, {}, {"zero": zero}), comm, device)
            for x, y in pc.shard(batches(3, 8, 8, 13), mesh):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: w.cpu() for name, w in pc.whole_weights(model).items()})
            mesh.close()
        tolerance = 0.0 if kind == torch_emulated.NAME else 1e-8
        assert not list(differences(found[0], found[1], tolerance))


def checkpoints_move_between_devices(folder: Path, kind: str, comm: pycoll.Communicator) -> None:
    """Trained on a device, saved, and trained further on the CPU, and the other way round."""
    cases = [({"dp": -1}, {}, {"zero": 3}), ({"tp": -1, "dp": 1}, {}, {})]
    data = list(batches(3, 8, 8, 13))
    results = []
    for number, devices in enumerate([(None, None), (kind, None), (None, kind)]):
        weights: dict[str, torch.Tensor] = {}
        for case, device, steps in zip(cases, devices, (data[:2], data[2:]), strict=True):
            mesh, model, optimizer = made(case, comm, device)
            if weights:
                assert pc.load(folder / f"{number}", model, optimizer) == 5
            for x, y in pc.shard(steps, mesh):
                model.step(x, y, loss=pc.cross_entropy)
                optimizer.step()
            pc.save(folder / f"{number}", model, optimizer, extra=5)
            weights = {name: w.cpu() for name, w in pc.whole_weights(model).items()}
            mesh.close()
        results.append(weights)
    tolerance = 0.0 if kind == torch_emulated.NAME else 1e-8
    for result in results[1:]:
        assert not list(differences(results[0], result, tolerance))


def training_has_the_bits_of_the_cpu(
    cases: dict[str, Any], kind: str, comm: pycoll.Communicator
) -> None:
    wrong = []
    kernel, Tile._has_kernel = Tile._has_kernel, lambda *_: False  # the device has no such kernel
    with sdpa_kernel(SDPBackend.MATH):
        for name, case in cases.items():
            expected = trained(case, comm, None)
            found = trained(case, comm, kind)
            tolerance = 0.0 if kind == torch_emulated.NAME else 1e-8
            wrong += [f"{name}: {text}" for text in differences(expected, found, tolerance)]
    Tile._has_kernel = kernel
    assert not wrong, "\n".join(wrong)


def test_torchs_tensors_on_two_ranks(kind):
    on_ranks(
        kind,
        2,
        collectives_take_torchs_tensors_on_its_streams,
        worlds_of_several_kinds_are_refused,
        links_keep_the_order_of_their_tensors,
        waits_of_a_stream_are_exposed_time,
        random_words_are_those_of_the_cpu,
        halos_are_those_of_the_cpu,
    )


def test_training_on_two_ranks(kind, tmp_path):
    pytest.importorskip("safetensors", reason="checkpoints need it")
    on_ranks(
        kind,
        2,
        partial(training_has_the_bits_of_the_cpu, CASES),
        plain_loop_has_the_bits_of_the_cpu,
        partial(checkpoints_move_between_devices, tmp_path),
    )


def test_training_on_four_ranks(kind):
    on_ranks(
        kind,
        4,
        halos_are_those_of_the_cpu,
        partial(training_has_the_bits_of_the_cpu, OF_FOUR),
    )
