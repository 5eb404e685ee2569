"""The table of modes says what was measured, and that is what the formulas say."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from pycoll import UsageError
from pycoll.parallel.tools import modes

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


def test_modes_share_input_bytes_storage_and_work_as_they_must(monkeypatch):
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:ring")
    n = 4
    one, dp, tp, pp = modes.measure(n)
    assert (one.input_share, dp.input_share, tp.input_share, pp.input_share) == (1, 1 / n, 1, 1)
    assert (one.moved, one.stored, one.balance) == (0, 1, 1)
    # Gradients once around: 2 (n - 1) / n of the model per rank, and the small message of a step.
    assert dp.moved == pytest.approx(2 * (n - 1), rel=0.02)
    assert dp.stored == n and dp.balance == 1
    # Two all-reduces of an activation per block, 2 (n - 1) / n of it per rank; the gradient of the
    # first block's input nobody needs.
    assert tp.activations_moved == pytest.approx(2 * (n - 1) * (2 * modes.DEPTH - 1), rel=0.02)
    assert 1 <= tp.stored < 1.05 and tp.balance == 1
    # An activation and its gradient at each cut, and that of the input for masks is none.
    assert pp.activations_moved >= 2 * (n - 1)
    assert pp.stored == 1 and pp.balance > 1.2  # 5 blocks on 4 stages
    assert "smaller than dp=2" in dp.limit and "cannot split 5 blocks into 6 stages" in pp.limit


def test_more_ranks_than_blocks_are_an_error():
    with pytest.raises(UsageError, match="expected 2 to 5 ranks, got 6"):
        modes.measure(6)
