"""Schedules of domains inside domains: proved, with the fewest bytes between sockets."""

import math
import random

import numpy as np
import pytest
from cases import each_case
from program_oracle import check_programs

import pycoll
from pycoll import schedule
from pycoll.errors import UsageError
from pycoll.schedule import levels

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("registered_schedules_are_forgotten")]

SIZES = [(1,), (2,), (5,), (2, 2), (3, 2), (2, 3), (1, 4), (2, 1, 2), (2, 2, 2), (3, 2, 2)]
SERVERS = [(8, 8, 2), (8, 2, 4, 2), (56, 2), (14, 4, 2), (8, 9)]
FORMS = [(split, name) for split, rows in levels.COLLECTIVES.items() for name in rows]
ROOTED = ("reduce", "broadcast")
of_forms = each_case("split, collective", FORMS)


def built(collective, sizes, split=True, root=0):
    name = f"levels {sizes} {split}"
    assert collective in schedule.register_levels(name, sizes, split=split)
    return schedule.build(collective, name, math.prod(sizes), root)


@of_forms
def test_levels_are_proved_for_every_root(split, collective):
    for sizes in SIZES:
        for root in range(math.prod(sizes)) if collective in ROOTED else (0,):
            s = built(collective, sizes, split, root)
            assert s.min_slots(2) <= 2
            s.verify(2, multicast=False)
            s.verify(2, join_blocks=False, join_chunks=False)


@of_forms
def test_levels_compute_the_collective_in_random_order(split, collective):
    for sizes in SIZES:
        s = built(collective, sizes, split)
        check_programs(s, s.programs(), s.min_slots(), random.Random(str(sizes)))


# 15 schedules of up to 128 ranks, whose proofs take a few seconds together.
@each_case("sizes", SERVERS)
def test_levels_of_servers_are_proved(sizes):
    for collective in ("all_reduce", "broadcast", "reduce"):
        assert built(collective, sizes).min_slots(2) <= 2
    leaders = built("all_reduce", sizes, split=False)
    assert leaders.min_slots(1) == 1


@of_forms
def test_sockets_send_the_fewest_bytes_to_each_other(split, collective):
    """A socket that reduces has to send each other socket its part; one that gathers, its own."""
    for sizes in [*[s for s in SIZES if len(s) > 1], (8, 4, 2)]:
        s = built(collective, sizes, split)
        inside = math.prod(sizes[:-1])
        sent = sum(
            move.chunks[1] / s.chunks_per_message
            for move in s.moves
            if move.src // inside != move.dst // inside
        )
        others = sizes[-1] - 1
        expected = {"all_reduce": 2 * others}.get(collective, others)
        assert sent == pytest.approx(expected), sizes


@of_forms
def test_a_round_stays_on_one_level(split, collective):
    sizes = (2, 3, 2)
    s = built(collective, sizes, split)
    strides = [1, 2, 6]
    level_of_round = {}
    for move in s.moves:
        apart = abs(move.src - move.dst)
        level = max(i for i, stride in enumerate(strides) if apart >= stride)
        assert level_of_round.setdefault(move.round, level) == level
    up, down = [0, 1, 2], [2, 1, 0]
    order = {"all_reduce": up + down, "reduce": up, "reduce_scatter": up}.get(collective, down)
    seen = [level_of_round[number] for number in sorted(level_of_round)]
    kept = [level for i, level in enumerate(seen) if i == 0 or seen[i - 1] != level]
    merged = [level for i, level in enumerate(order) if i == 0 or order[i - 1] != level]
    assert kept == merged


@pytest.mark.ranks
def test_levels_run_on_ranks():
    schedule.register_levels("domains", (2, 2, 2))
    schedule.register_levels("domains of leaders", (2, 2, 2), split=False)

    def work(comm):
        x = np.arange(1000.0) + comm.rank
        total = [
            comm.all_reduce(x.copy(), algorithm=name) for name in ("domains", "domains of leaders")
        ]
        row = comm.broadcast(x.copy(), root=5, algorithm="domains")
        mine = comm.reduce_scatter(x.copy(), algorithm="domains")
        return total, row, comm.all_gather(mine, algorithm="domains")

    expected = 8 * np.arange(1000.0) + 28
    for (split, leaders), row, gathered in pycoll.run_ranks(work, 8, threads=True):
        assert np.array_equal(split, expected) and np.array_equal(leaders, expected)
        assert np.array_equal(row, np.arange(1000.0) + 5)
        assert np.array_equal(gathered.reshape(-1), expected)


@each_case("sizes", [(), 8, (2, 0), (2, 1.5), "22", (True,)])
def test_sizes_that_make_no_levels_are_refused(sizes):
    with pytest.raises(UsageError, match="sizes: expected members of a unit"):
        schedule.register_levels("refused", sizes)


def test_another_number_of_ranks_is_refused():
    schedule.register_levels("of eight", (2, 4))
    with pytest.raises(UsageError, match="are 8 ranks, not 4"):
        schedule.build("all_reduce", "of eight", 4)


def test_too_many_peers_in_one_domain_are_refused():
    with pytest.raises(UsageError, match="at most 64"):
        built("all_reduce", (72,)).min_slots()
