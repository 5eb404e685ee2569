"""A few cases of each kind of injected fault; tests/fuzz/campaign.py runs many."""

from __future__ import annotations

import injections
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", injections.names())
def test_few_cases_of_an_injected_fault(name):
    """Seconds: each case starts ranks of its own."""
    kind = injections.load(name)
    if reason := injections.why_not(kind):
        pytest.skip(reason)
    for seed in kind.FEW:
        outcome = kind.run_case(seed)
        assert not outcome.complaint, f"{name}, seed {seed}: {outcome.complaint}"
