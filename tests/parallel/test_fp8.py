"""Products in 8 bits: the scales of one process on shared layers, and the curve of bf16."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import assert_refused, in_one_world
from test_precision import curve, off
from torch import nn

from pycoll import parallel as pc
from pycoll import run_ranks

IN, HIDDEN, OUT = 32, 96, 32


def shared_layers(comm, tp):
    """A column and a row layer whose second half is 2^-16 times as large as their first."""
    mesh = pc.mesh(tp=comm.size, comm=comm)
    random = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(IN, HIDDEN, bias=False), nn.Linear(HIDDEN, OUT, bias=False))
    small = torch.ones(HIDDEN).mul_(0.1)
    small[HIDDEN // 2 :] *= 2.0**-16
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(HIDDEN, IN, generator=random) * small[:, None])
        model[1].weight.copy_(torch.randn(OUT, HIDDEN, generator=random) * small)
    exact = [layer.weight.detach().clone() for layer in model]
    model = pc.parallelize(model, mesh, tp=tp, precision=pc.Precision(torch.float32, fp8="*"))
    x = torch.randn(3, 7, IN, generator=random)  # 21 tokens: no multiple of 16
    y = model(x)
    y.square().sum().backward()
    found = [y.detach(), *pc.whole_gradients(model).values()]
    mesh.close()
    x = x.flatten(0, 1)
    hidden = x @ exact[0].t()
    gradient = 2 * hidden @ exact[1].t()
    right = [gradient / 2, (gradient @ exact[1]).t() @ x, gradient.t() @ hidden]
    return found, right


def relative(one, other) -> float:
    return float((one.flatten() - other.flatten()).norm() / other.norm())


def test_shared_layers_have_the_scales_of_one_process():
    """A rank with the small half alone would round it to numbers of its own."""
    plans = [{"0": "col", "1": "row"}, {"0": "gather", "1": "gather"}]
    ((found, right),) = run_ranks(shared_layers, 1, plans[0])
    errors = [relative(one, other) for one, other in zip(found, right, strict=True)]
    assert all(0.005 < error < 0.08 for error in errors), errors  # 4 and 3 bits of precision
    for of_ranks in in_one_world(shared_layers, [(2, plan) for plan in plans]):
        for others, _ in of_ranks:
            assert max(map(relative, others, found)) < 1e-6


@pytest.mark.slow  # four trainings of a GPT
def test_fp8_has_the_curve_of_bf16_on_every_layout():
    """20 steps; seen: 0.03 % from bf16, and 0.03 % from one process."""
    expected = run_ranks(curve, 1, {}, "bf16", 20)[0][0]
    alone = run_ranks(curve, 1, {}, "fp8", 20)[0][0]
    assert 0 < off(expected, alone) < 0.005
    cases = [(2, {"dp": 2}, "fp8", 20), (2, {"tp": 2}, "fp8", 20)]
    for case, of_ranks in zip(cases, in_one_world(curve, cases), strict=True):
        for losses, _, stepped, _ in of_ranks:
            assert off(expected, losses) < 0.005 and off(alone, losses) < 0.002, case
            assert stepped == {torch.float32}


@pytest.mark.pure
def test_memory_counts_inputs_of_one_byte():
    def kept(precision):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        x = torch.zeros(128, 64)
        return pc.memory(model, {"dp": 1}, precision=precision, x=x)[0].activations

    full, short = kept("bf16"), kept("fp8")
    assert full == 2 * 2 * 128 * 64 and 128 * 64 * 2 <= short < 128 * 64 * 2 + 64


def test_unfit_layers_and_versions_of_torch_are_refused():
    def of(size, fp8="*"):
        precision = pc.Precision(torch.bfloat16, fp8=fp8)
        return lambda mesh: pc.parallelize(
            nn.Sequential(nn.Linear(16, size), nn.Linear(size, 16)),
            mesh,
            tp={"0": "col", "1": "row"},
            precision=precision,
        )

    def without(mesh):
        def multiply(*args, **kwargs):
            raise NotImplementedError("Could not run 'aten::_scaled_mm'")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_scaled_mm", multiply)
            of(32)(mesh)

    assert_refused(
        {
            "no linear layer '*' has sizes that are multiples of 16": of(24),
            "no linear layer 'blocks.*' has sizes": of(32, "blocks.*"),
            "layer '0': products in fp8 need multiples of 16, but tp gives this rank (24, 16) of "
            "(48, 16)": of(48),
            "cannot multiply matrices in fp8 on 'cpu' (Could not run 'aten::_scaled_mm')": without,
        },
        tp=2,
    )
