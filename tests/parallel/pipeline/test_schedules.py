"""Schedules as data: compared with torch's, their stated bubbles, refusals of the proof."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest

from pycoll.errors import UsageError
from pycoll.parallel.pipeline import (
    Action,
    Costs,
    Kind,
    Schedule,
    build,
    generator,
    names,
    simulate,
    validate,
)
from pycoll.parallel.pipeline.schedules.transfers import (
    check_link_order,
    receive_of,
    with_transfers,
)

pytestmark = pytest.mark.pure

RANKS = (1, 2, 3, 4, 8)
COSTS = (Costs(), Costs(1, 2, 1), Costs(1, 1, 2), Costs(2, 1, 1), Costs(3, 2, 2))


def shapes(name: str, ranks, microbatches):
    for p in ranks:
        for v in generator(name).allowed_stages or (1, 2, 3):
            yield from ((p, m, v) for m in microbatches)


def mutated(schedule: Schedule, rank: int, order: list[Action]) -> Schedule:
    orders = list(schedule.orders)
    orders[rank] = tuple(order)
    return Schedule("mutant", schedule.num_microbatches, schedule.placement, tuple(orders))


@pytest.mark.parametrize("name", names())
def test_bubble_and_live_activations_are_what_is_stated(name):
    row = generator(name)
    for p, m, v in shapes(name, RANKS, (1, 2, 3, 4, 5, 8, 9, 19)):
        schedule = build(name, p, m, v)
        played = [simulate(schedule, costs) for costs in COSTS if row.exact(p, m, v, costs)]
        expected = [row.bubble(p, m, v, costs) for costs in COSTS if row.exact(p, m, v, costs)]
        assert [one.bubble for one in played] == pytest.approx(expected, abs=1e-9), (p, m, v)
        stated = tuple(row.live(p, m, v, rank) for rank in range(p))
        assert played[0].peak_live == stated, (p, m, v)  # equal costs, the first, are always exact


# torch's generators.


def torch_orders(name: str, p: int, m: int, v: int) -> list[list[str]]:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    # Its stages are mocks with the signatures of the class, which take a third of a second each.
    with mock.patch.object(visualizer.mock, "create_autospec", lambda *_, **__: mock.Mock()):
        ops = visualizer.get_schedule_ops(name, p, m, v)
    # REDUCE_GRAD is its word for the end of a step, when gradients are reduced between replicas.
    # OVERLAP_F_B is a forward and a backward that may run at once: here in their order.
    parts = ([op.sub_actions or (op,) for op in order if op] for order in ops)
    orders = [[str(op) for of in order for op in of if "REDUCE" not in str(op)] for order in parts]
    if name == "1F1B":
        # torch 2.13 counts the forwards of the last rank from 1 in this list, which it only draws.
        ith = iter(range(m))
        orders[-1] = [f"{p - 1}F{next(ith)}" if "F" in op else op for op in orders[-1]]
    return orders


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in names() if generator(name).torch_name])
def test_orders_are_those_of_torch(name):
    row = generator(name)
    compared = 0
    for p, m, v in shapes(name, (2, 3, 4), (1, 2, 4, 5, 6, 8, 12)):
        if (v == 1 and row.allowed_stages != (1,)) or (name == "1f1b" and m < p):
            continue  # with one stage per rank, or fewer microbatches in 1F1B, torch has no list
        try:
            expected = torch_orders(row.torch_name, p, m, v)
        except ValueError as error:
            uneven = "multiple of the number of rounds" in str(error) and m % max(1, m // p)
            few = "at least as many microbatches as stages" in str(error) and m < p * v
            assert uneven or few
            continue  # torch refuses them, we do not
        compared += 1
        got = [[str(action) for action in order] for order in build(name, p, m, v).orders]
        assert got == expected, (p, m, v)
    assert compared >= 10


@pytest.mark.torch
def test_torch_names_are_taken():
    assert build("Interleaved1F1B", 2, 4) == build("interleaved_1f1b", 2, 4)
    assert generator("ZBVZeroBubble") is generator("zbv")


# Refusals.


def test_wrong_schedules_are_refused_with_their_mistake():
    gpipe = build("gpipe", 2, 2)
    twice = mutated(gpipe, 0, [gpipe.orders[0][0], *gpipe.orders[0]])
    for message, mistake in {
        r"no schedule 'gpip'.*did you mean gpipe": lambda: build("gpip", 2, 2),
        "1f1b has 1 stages per rank, got 2": lambda: build("1f1b", 2, 2, 2),
        "rank 0 has 0F0 twice": lambda: validate(twice),
        "rank 1 has 1B0 before 1F0": lambda: validate(Schedule.from_text("0F0 0B0\n1B0 1F0")),
        "rank 0 holds the activations of 4 .* at most 3": (
            lambda: validate(build("gpipe", 2, 4), max_live=[3, 4])
        ),
        "stage 0 is on rank 0 and, in 0B0, on rank 1": lambda: Schedule.from_text("0F0\n0B0"),
        "'0X1' is not an action": lambda: Schedule.from_text("0F0 0X1"),
    }.items():
        with pytest.raises(UsageError, match=message):
            mistake()


@pytest.mark.parametrize("name", names())
def test_every_action_left_out_is_noticed(name):
    schedule = build(name, 2, 3)
    for rank, order in enumerate(schedule.orders):
        for i in range(len(order)):
            with pytest.raises(UsageError, match="mutant: rank"):
                validate(mutated(schedule, rank, [*order[:i], *order[i + 1 :]]))


@pytest.mark.parametrize("name", names())
def test_every_swap_is_refused_or_plays(name):
    """The proof and the simulator agree on every swap of two neighbours."""
    schedule = build(name, 3, 4)
    refused = 0
    for rank, order in enumerate(schedule.orders):
        for i in range(len(order) - 1):
            swapped = [*order[:i], order[i + 1], order[i], *order[i + 2 :]]
            mutant = mutated(schedule, rank, swapped)
            try:
                validate(mutant)
            except UsageError:
                refused += 1
            else:
                simulate(mutant)
    assert refused


def test_deadlock_names_who_waits_for_whom():
    text = "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n"
    with pytest.raises(UsageError) as caught:
        validate(Schedule.from_text(text, "mine"))
    assert str(caught.value) == (
        "schedule mine deadlocks: rank 0 waits in 0B0 (position 1) for 1B0; "
        "rank 1 waits in 1F1 (position 0) for 0F1"
    )
    with pytest.raises(UsageError, match="deadlocks"):
        simulate(Schedule.from_text(text))


@pytest.mark.parametrize("name", names())
def test_text_comes_back_as_the_same_schedule(name):
    schedule = build(name, 3, 4)
    assert Schedule.from_text(schedule.text(), schedule.name) == schedule


# Facts of single schedules.


def test_reference_values_of_torch_schedules_four_ranks_eight_microbatches():
    """Computed once from torch's lists with another simulator: f = i = w, two stages per rank."""
    for name, time in (("interleaved_1f1b", 28.5), ("looped_bfs", 28.5), ("zb1p", 25.5)):
        assert simulate(build(name, 4, 8, 2)).time == time
    assert simulate(build("zbv", 4, 8)).time == 25.5
    assert simulate(build("interleaved_1f1b", 4, 8, 2)).peak_live == (11, 9, 7, 5)
    assert simulate(build("zb1p", 4, 8, 2)).peak_live == (8, 8, 8, 8)


STREAMS = [name for name in names() if generator(name).staleness is not None]


@pytest.mark.parametrize("name", STREAMS)
def test_schedule_without_a_flush_has_no_bubble_in_its_steady_state(name):
    for p in (2, 4, 8):
        played = simulate(build(name, p, 32))
        assert played.idle_share_between(*played.steady) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", STREAMS)
def test_staleness_is_what_is_stated(name):
    staleness = generator(name).staleness
    for p in (1, 2, 4, 8):
        schedule = build(name, p, 20)
        for stage, order in enumerate(schedule.orders):
            updates, used = 0, {}
            for action in order:
                i = action.microbatch
                updates += action.kind is Kind.U
                if action.kind is Kind.F:
                    used[i] = schedule.versions[i] if schedule.versions else updates
                if action.kind is Kind.B:
                    assert updates - used[i] == staleness(p, stage, i)


def test_versions_that_a_stage_does_not_have_yet_are_refused():
    schedule = build("pipedream_2bw", 2, 4)
    early = replace(schedule, versions=(0, 0, 1, 0))
    with pytest.raises(UsageError, match="rank 0 has 0F2 after 0 updates of the stage, and it use"):
        validate(early)


def test_slow_stage_bounds_the_time():
    """With one stage twice as long, the pipeline goes at its pace."""
    played = simulate(build("1f1b", 4, 32), stage_scale=[1, 1, 2, 1])
    assert 32 * 6 <= played.time <= 32 * 6 + 3 * 6


def test_transfers_lengthen_the_way_there_and_back():
    assert simulate(build("gpipe", 2, 1), Costs(transfer=0.5)).time == 6 + 2 * 0.5
    assert simulate(build("zbv", 1, 1), Costs(transfer=0.5)).time == 3  # one rank: no transfer


def test_schedules_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pycoll.parallel import pipeline\n"
        "print(pipeline.simulate(pipeline.build('1f1b', 4, 8)).time)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("33.0\n", 0), done.stderr


@pytest.mark.parametrize("name", names())
def test_transfers_are_matched_posted_ahead_and_bounded(name):
    schedule = build(name, 4, 6)
    local = sum(a == b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    for prefetch in (1, 2, 5):
        lowered = with_transfers(schedule, prefetch)
        validate(lowered)
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
        assert len(sent) == 2 * 6 * (schedule.num_stages - 1 - local)


@pytest.mark.parametrize("name", names())
def test_stages_receive_in_the_order_in_which_they_are_sent_to(name):
    for p, m, v in shapes(name, (2, 3, 4), (1, 2, 5, 9)):
        schedule = build(name, p, m, v)
        for prefetch in (1, 2, 5):
            check_link_order(with_transfers(schedule, prefetch))


def test_a_link_with_another_order_at_its_ends_is_refused():
    schedule = build("gpipe", 2, 2)
    forwards, rest = schedule.orders[1][:2], schedule.orders[1][2:]
    swapped = mutated(schedule, 1, [*reversed(forwards), *rest])
    validate(swapped)  # messages with tags can arrive in any order
    with pytest.raises(UsageError, match=r"1RECV_F0 is sent where 1RECV_F1 is received"):
        check_link_order(with_transfers(swapped))
