"""The discrete-event simulation: ports, slots, tiles, costs per link."""

from itertools import pairwise

import pytest
from cases import each_case

from pycoll import _core, schedule

pytestmark = pytest.mark.pure

ALGORITHMS = [(row.collective, row.name) for row in _core.algorithms()]


@each_case("collective, name", ALGORITHMS)
@each_case("n", [2, 3, 6, 8])
def test_no_port_carries_two_transfers_at_once(collective, name, n):
    s = schedule.build(collective, name, n)
    events = s.simulate(10_000, 1e-6, 1e-9, 1e-9, slots=2, tile_bytes=3000).events
    transfers = [e for e in events if e.kind == "transfer"]
    assert transfers
    for end in ("rank", "peer"):
        for rank in range(n):
            own = sorted((e.start_s, e.end_s) for e in transfers if getattr(e, end) == rank)
            assert all(a[1] <= b[0] + 1e-15 for a, b in pairwise(own))
    assert [e.start_s for e in events] == sorted(e.start_s for e in events)


@each_case("tile_bytes", [1, 100, 999, 1000, 4096, None])
def test_tiles_send_the_same_bytes(tile_bytes):
    s = schedule.build("all_reduce", "ring", 3)
    assert sum(s.simulate(1000, 0, 1e-9, tile_bytes=tile_bytes).sent_bytes) == 4 * 1000


def test_tiles_overlap_in_a_pipeline():
    moves = [(rank, "copy", 0, 1, rank, rank + 1) for rank in range(3)]
    chain = schedule.Schedule(_core.schedule_from_moves("broadcast", "chain", 4, 1, 0, moves))
    assert chain.simulate(1600, 0.0, 1.0).time_s == 3 * 1600
    # Three ranks fill the pipeline, then a tile of 100 bytes comes out every 100 s.
    assert chain.simulate(1600, 0.0, 1.0, tile_bytes=100).time_s == (3 + 15) * 100


def test_fewer_slots_are_never_faster():
    s = schedule.build("all_reduce", "tree", 6)
    times = [
        s.simulate(1 << 16, 1e-6, 1e-9, 1e-9, slots=k, tile_bytes=1 << 13).time_s for k in (2, 4, 8)
    ]
    assert times[0] >= times[2] * (1 - 1e-12)


def test_costs_may_differ_per_link():
    s = schedule.build("all_reduce", "ring_naive", 3)
    matrix = [[0, 1.0, 9.0], [7.0, 0, 2.0], [4.0, 9.0, 0]]
    # 0 -> 1 -> 2 -> 0 -> 1
    for alpha in (matrix, lambda src, dst: matrix[src][dst]):
        assert s.simulate(8, alpha, 0.0).time_s == 1 + 2 + 4 + 1


def test_messages_on_one_receiving_port_arrive_one_after_another():
    s = schedule.build("all_reduce", "star", 5)
    events = s.simulate(10, 1.0, 0.0, 0.0).events
    assert [(e.rank, e.start_s) for e in events[:4]] == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_reduction_is_an_event_where_it_happens():
    events = schedule.build("all_reduce", "one_shot", 3).simulate(12, 0.0, 0.0, 2.0).events
    reductions = [(e.rank, e.start_s, e.end_s, e.nbytes) for e in events if e.kind == "reduce"]
    assert reductions == [(rank, 0.0, 48.0, 12) for rank in range(3)]


def test_empty_message_takes_no_time():
    simulation = schedule.build("all_reduce", "ring", 4).simulate(0, 1e-6, 1e-9)
    assert simulation.time_s == 0 and simulation.events == ()


def test_deadlock_is_an_error_that_names_the_step():
    with pytest.raises(schedule.UsageError, match="slots=1 .* rank 0 in step 1"):
        schedule.build("all_reduce", "ring", 4).simulate(64, 1e-6, 1e-9, slots=1)


@each_case(
    "name, value, message",
    [
        ("nbytes", -1, "nbytes is -1, expected a whole number from 0"),
        ("tile_bytes", -5, "tile_bytes is -5, expected a whole number from 0"),
        ("slots", 0, "slots is 0, expected a whole number from 1"),
        ("alpha", -1.0, "alpha is -1.0, expected a number of 0 or more, 4 x 4 of them, or a func"),
        ("beta", float("nan"), "beta is nan, expected a number of 0 or more"),
        ("gamma", [["x"]], "gamma is .*'x'.*, expected a number of 0 or more"),
        ("nbytes", 1 << 50, "1125899906842624 tiles of .* are more than 1000000000 messages"),
    ],
)
def test_impossible_sizes_are_refused(name, value, message):
    arguments = {"nbytes": 8, "alpha": 0.0, "beta": 0.0, "tile_bytes": 1} | {name: value}
    with pytest.raises(schedule.UsageError, match=message):
        schedule.build("all_reduce", "ring", 4).simulate(**arguments)


def test_cost_matrix_of_the_wrong_size_is_refused():
    with pytest.raises(schedule.UsageError, match="4 x 4 link costs"):
        schedule.build("all_reduce", "ring", 4).simulate(8, [[0.0] * 3] * 3, 0.0)
