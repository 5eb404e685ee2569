"""An elastic training that loses a host with all its ranks, and takes in another one.

tests/fuzz/injections/training_partitions.py pulls cables.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The dataset of the tests of trainers, and memory that the test shares with ranks.
sys.path[:0] = [str(Path(__file__).parents[1] / other) for other in ("fuzz", "parallel")]
pytestmark = [pytest.mark.ranks, pytest.mark.torch, pytest.mark.timeout(120)]

STEPS, LOST_AT, JOINED_AT = 8, 3, 5


@pytest.mark.slow  # a training on four hosts, and one on one; torch is imported once for all ranks
def test_host_lost_for_good_is_replaced_by_a_new_one(four):
    """All ranks of rank 0's host are killed, so the next rank 0 listens at its own address.

    Each rank of zero=1 has pieces of its own: with copies=1, they are on the other host, too.
    """
    pytest.importorskip("torch._dynamo")
    from host_trainings import Trained, Training, has_bits, undisturbed

    training = Training(STEPS, full=4, waits_at=JOINED_AT, dies_at=LOST_AT, victims=(0, 1))
    trained = Trained(four, training, [0, 0, 1, 1], silence_s=1.5)
    trained.wait_for_commit(LOST_AT + 1)  # two of four go on
    for _ in range(2):
        trained.add(2)
    weights = undisturbed(four, training)
    outcomes = trained.outcomes()
    assert [outcome.ended for outcome in outcomes[:2]] == [9, 9]
    for rank, outcome in enumerate(outcomes[2:]):
        assert has_bits(outcome, weights), (rank, outcome)
