"""Schedules written in Python: the builder's refusals, and algorithms end to end."""

import random

import pytest
from cases import each_case
from program_oracle import check_programs

from pycoll import _core, schedule
from pycoll.errors import Error, UsageError
from pycoll.schedule import Move, copy, reduce

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("registered_schedules_are_forgotten")]


def register_chain(name="up_down", num_chunks=2):
    """A reduction down the ranks and a copy up again, chunk by chunk."""

    @schedule.register("all_reduce", name, num_chunks=num_chunks, cost="slow", source="here")
    def chain(n, root):
        for chunk in range(2):
            for i in range(n - 1):
                yield reduce(chunk + i, chunk, src=n - 1 - i, dst=n - 2 - i)
                yield copy(chunk + n - 1 + i, (chunk, 1), src=i, dst=i + 1)


@each_case("n", [1, 2, 3, 5, 8, 17])
def test_registered_algorithm_is_built_proved_and_simulated(n):
    register_chain()
    s = schedule.build("all_reduce", "up_down", n)
    assert (s.collective, s.algorithm, s.n, s.num_chunks) == ("all_reduce", "up_down", n, 2)
    assert len(s.moves) == 4 * (n - 1)
    slots = s.min_slots()
    assert s.verify(slots).slots == slots
    check_programs(s, s.programs(), slots, random.Random(n))
    nbytes = 64
    sent = s.simulate(nbytes, 1e-6, 1e-9).sent_bytes
    assert sum(sent) == 2 * (n - 1) * nbytes
    assert s.explain().startswith(f"all_reduce up_down: {n} rank{'s' * (n > 1)}, 2 chunks, ")


def test_registered_algorithm_is_listed_and_described():
    register_chain()
    assert schedule.algorithms("all_reduce")[-1] == "up_down"
    assert "up_down" not in schedule.algorithms("broadcast")
    assert schedule.info("all_reduce", "up_down").cost == "slow"


def test_num_chunks_may_depend_on_n():
    register_chain(num_chunks=lambda n: n + 2)
    with pytest.raises(schedule.ScheduleError, match="has not contributed"):
        schedule.build("all_reduce", "up_down", 3)
    register_chain(num_chunks=lambda n: 2)
    assert schedule.build("all_reduce", "up_down", 3).num_chunks == 2


def test_wrong_algorithm_is_refused_when_built():
    @schedule.register("all_reduce", "forgetful")
    def forgetful(n, root):
        for rank in range(1, n):
            yield reduce(0, 0, rank, 0)

    schedule.build("all_reduce", "forgetful", 1)
    with pytest.raises(schedule.ScheduleError, match="rank 1, chunk 0, at the end"):
        schedule.build("all_reduce", "forgetful", 3)
    assert issubclass(schedule.ScheduleError, UsageError)
    assert issubclass(UsageError, Error) and issubclass(UsageError, ValueError)


def test_moves_of_built_in_algorithms_make_the_same_programs():
    for row in _core.algorithms():
        s = schedule.build(row.collective, row.name, 5)
        moves = [(m.round, m.kind, *m.chunks, m.src, m.dst) for m in s.moves]
        again = schedule.Schedule(
            _core.schedule_from_moves(
                row.collective, row.name, 5, s.num_chunks, 0, moves, s.core.multicast
            )
        )
        assert again.explain() == s.explain()
        assert again.moves == s.moves


def test_helpers_make_moves():
    assert copy(1, 2, src=3, dst=4) == Move(1, "copy", (2, 1), 3, 4)
    assert reduce(1, (2, 5), src=3, dst=4) == Move(1, "reduce", (2, 5), 3, 4)


def test_registered_name_may_not_hide_a_built_in_one():
    with pytest.raises(UsageError, match="built-in algorithm called 'ring'"):
        register_chain(name="ring")


@each_case(
    "arguments, message",
    [
        (("all_reduce", "rong", 4), "no algorithm called 'rong': expected one of ring, halving"),
        (("all_reducing", "ring", 4), "no collective is called 'all_reducing': .* all_reduce"),
        (("all_reduce", "ring", 0), "n is 0, expected a whole number from 1 to 4096"),
        (("all_reduce", "ring", -3), "n is -3, expected a whole number from 1 to 4096"),
        (("all_reduce", "ring", 4, 1), "expected a root from 0 to 0, got 1"),
        (("broadcast", "star", 4, 4), "root is 4, expected a whole number from 0 to 3"),
        (("broadcast", "star", 4, -1), "root is -1, expected a whole number from 0 to 3"),
    ],
)
def test_build_of_something_unknown_is_refused(arguments, message):
    collective, name, *numbers = arguments
    is_known = name != "rong" and collective != "all_reducing"
    for one in schedule.algorithms(collective) if is_known else [name]:
        with pytest.raises(UsageError, match=message):
            schedule.build(collective, one, *numbers)


@each_case(
    "moves, message",
    [
        ([(-1, "copy", 0, 1, 0, 1)], "rounds are counted from 0"),
        ([(0, "copy", 0, 1, 0, 3)], "there is no such rank"),
        ([(0, "copy", 0, 1, -1, 1)], "there is no such rank"),
        ([(0, "copy", 0, 1, 1, 1)], "two different ranks"),
        ([(0, "copy", 3, 2, 0, 1)], "there are no such chunks"),
        ([(0, "copy", -1, 1, 0, 1)], "there are no such chunks"),
        ([(0, "copy", 0, 0, 0, 1)], "there are no such chunks"),
        ([(0, "copy", 2**31 - 1, 2**31 - 1, 0, 1)], "there are no such chunks"),
        ([(0, "swap", 0, 1, 0, 1)], "kind is 'copy' or 'reduce', got 'swap'"),
        ([(0, "copy", 0, 1, 0, 2), (0, "copy", 0, 1, 1, 2)], "one of them copies"),
        ([(0, "copy", 0, 1, 0, 2), (0, "reduce", 0, 1, 1, 2)], "one of them copies"),
        ([(0, "reduce", 0, 1, 0, 2), (0, "reduce", 0, 1, 0, 2)], "the same move twice"),
        ([(0, "reduce", 0, 2, 0, 2), (0, "reduce", 1, 1, 1, 2)], "overlap"),
        ([(0, "copy", 0, 4, 0, 2), (0, "copy", 1, 1, 0, 2), (0, "copy", 3, 1, 1, 2)], "overlap"),
    ],
)
def test_moves_without_a_meaning_are_refused(moves, message):
    with pytest.raises(UsageError, match=message):
        _core.schedule_from_moves("all_reduce", "test", 3, 4, 0, moves)


def test_refusal_names_the_move():
    moves = [(2, "reduce", 0, 2, 0, 2), (2, "reduce", 1, 1, 1, 2)]
    with pytest.raises(UsageError) as caught:
        _core.schedule_from_moves("all_reduce", "test", 3, 4, 0, moves)
    assert str(caught.value) == (
        "all_reduce test, round 2: reduce chunk 1 from rank 1 to rank 2 meets "
        "round 2: reduce chunks 0..1 from rank 0 to rank 2: "
        "their chunks overlap without being the same"
    )


def test_reduction_without_an_operator_is_refused():
    with pytest.raises(UsageError, match="no operator to reduce with"):
        _core.schedule_from_moves("broadcast", "test", 2, 1, 0, [(0, "reduce", 0, 1, 0, 1)])


def test_disjoint_ranges_may_reach_one_rank_in_one_round():
    moves = [(0, "copy", 0, 2, 0, 2), (0, "copy", 2, 1, 1, 2), (0, "reduce", 3, 1, 0, 2)]
    assert len(_core.schedule_from_moves("all_reduce", "test", 3, 4, 0, moves).moves) == 3


def test_registered_algorithms_of_several_blocks_are_proved_and_simulated():
    @schedule.register("all_to_all", "halves", num_chunks=lambda n: 2 * n * n)
    def halves(n, root):
        """The upper half of every block travels in the opposite order of rounds."""
        for src in range(n):
            for way in range(1, n):
                dst = (src + way) % n
                yield copy(way, 2 * (src * n + dst), src, dst)
                yield copy(n - way, 2 * (src * n + dst) + 1, src, dst)

    @schedule.register("scan", "two_step")
    def two_step(n, root):
        """Even ranks add up by a chain; odd ones take from their left neighbour."""
        for rank in range(0, n - 1, 2):
            yield reduce(0, 0, rank, rank + 1)
        for i, rank in enumerate(range(1, n - 1, 2)):
            yield reduce(1 + i, 0, rank, rank + 1)
            if rank + 2 < n:
                yield reduce(1 + i, 0, rank, rank + 2)

    @schedule.register("gather", "down", num_chunks=lambda n: n)
    def down(n, root):
        for rank in range(n):
            if rank != root:
                yield copy(0, rank, rank, root)

    for n in (1, 2, 3, 5, 8):
        for collective, name in (
            ("all_to_all", "halves"),
            ("scan", "two_step"),
            ("gather", "down"),
        ):
            for root in range(n if collective == "gather" else 1):
                s = schedule.build(collective, name, n, root)
                slots = s.min_slots()
                for join_blocks in (True, False):
                    programs = s.programs(join_blocks=join_blocks)
                    check_programs(s, programs, slots, random.Random(n))
    sent = schedule.build("all_to_all", "halves", 4).simulate(64, 1e-6, 1e-9).sent_bytes
    assert list(sent) == [48] * 4
    assert schedule.build("scan", "two_step", 5).verify().order == "other"


def test_registered_number_of_chunks_must_fit_the_blocks():
    @schedule.register("all_gather", "thirds", num_chunks=3)
    def thirds(n, root):
        yield from ()

    with pytest.raises(UsageError, match="a multiple of its 4 blocks as number of chunks, got 3"):
        schedule.build("all_gather", "thirds", 4)
