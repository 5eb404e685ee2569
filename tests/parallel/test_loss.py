"""Losses on logits that ranks share: pc.cross_entropy, and a user's own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, PLAN, batches  # noqa: E402
from torch.nn import functional  # noqa: E402

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


class InDict(GPT):
    def forward(self, tokens_BT):
        return {"logits": super().forward(tokens_BT), "more": 1}


def mean_of_torch(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_losses_of_whole_and_shared_logits_are_equal():
    x, y = next(batches(1, 4))

    def work(comm):
        torch.set_default_dtype(torch.float64)
        mesh = pc.mesh(tp=comm.size, comm=comm)
        found = []
        for make, loss in (
            (GPT, pc.cross_entropy),
            (GPT, mean_of_torch),
            (InDict, lambda out, y: mean_of_torch(out["logits"], y)),
        ):
            with pc.keyed_init(mesh):
                model = make(depth=1, drop=0.0)
            model = pc.parallelize(model, mesh, tp=PLAN)
            found.append(model.evaluate(x, y, loss=loss))
            out = model.step(x, y, loss=loss, microbatches=2)
            found += [out.loss, float(pc.whole_gradients(model)["head.weight"].norm())]
            assert out.tokens == int((y != -100).sum())
        return found

    expected = run_ranks(work, 1)[0]
    assert expected[::3] == pytest.approx(expected[1::3], abs=1e-12)
    for found in run_ranks(work, 2):
        assert found == pytest.approx(expected, abs=1e-12)
        assert found[0] == pytest.approx(found[3], abs=1e-12)
