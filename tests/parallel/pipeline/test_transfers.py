"""Transfers of a schedule: matched, posted ahead, bounded."""

from __future__ import annotations

import pytest

from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.schedules.actions import Kind
from pycoll.parallel.pipeline.schedules.transfers import receive_of, with_transfers

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("name", pipeline.names())
def test_transfers_are_matched_posted_ahead_and_bounded(name, prefetch):
    schedule = pipeline.build(name, 4, 6)
    lowered = with_transfers(schedule, prefetch)
    pipeline.validate(lowered)
    assert lowered.without(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B) == schedule
    sent, received = set(), set()
    for order in lowered.orders:
        waiting = 0
        posted = set()
        for action in order:
            s, i = action.stage, action.microbatch
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                waiting += 1
                posted.add(action)
                assert waiting <= prefetch
                received.add((action.kind is Kind.RECV_F, s, i))
            elif action.kind in (Kind.SEND_F, Kind.SEND_B):
                forward = action.kind is Kind.SEND_F
                sent.add((forward, s + 1 if forward else s - 1, i))
            elif (need := receive_of(schedule, action)) is not None:
                assert need in posted
                waiting -= 1
    assert sent == received
    stages = schedule.num_stages
    local = sum(a == b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    assert len(sent) == 2 * 6 * (stages - 1 - local)
