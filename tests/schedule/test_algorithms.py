"""Every algorithm of the table, for many world sizes."""

import math
import random

import pytest
from program_oracle import check_programs

from pycoll import _core, schedule

pytestmark = pytest.mark.pure

ALGORITHMS = [(row.collective, row.name) for row in _core.algorithms()]
ALPHA, BETA, GAMMA = 3e-6, 2e-9, 5e-10  # seconds, seconds per byte


COLLECTIVES = {row.name: row for row in _core.collectives()}


def roots_of(collective, n):
    return range(n) if COLLECTIVES[collective].has_root else [0]


def message_bytes(s):
    """A size that the chunks split evenly."""
    row = COLLECTIVES[s.collective]
    return 96 * s.num_chunks // row.num_blocks(s.n) * row.blocks_per_message(s.n)


@pytest.mark.parametrize(("collective", "name"), ALGORITHMS)
@pytest.mark.parametrize("n", range(1, 18))
def test_algorithm_is_proved_with_8_slots_in_every_lowering(collective, name, n):
    for root in roots_of(collective, n):
        s = schedule.build(collective, name, n, root)
        for fuse in (False, True):
            for multicast in (False, True):
                fewest = s.min_slots(8, fuse=fuse, multicast=multicast)
                for slots in range(1, 9):
                    if slots >= fewest:
                        s.verify(slots, fuse=fuse, multicast=multicast)
                    else:
                        with pytest.raises(schedule.ScheduleError, match="deadlock"):
                            s.verify(slots, fuse=fuse, multicast=multicast)


@pytest.mark.parametrize(("collective", "name"), ALGORITHMS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 16])
def test_algorithm_computes_the_collective_in_random_order(collective, name, n):
    seed = n
    for root in {0, n // 2} & set(roots_of(collective, n)):
        s = schedule.build(collective, name, n, root)
        for multicast in (False, True):
            slots = s.min_slots(multicast=multicast)
            programs = s.programs(multicast=multicast)
            check_programs(s, programs, slots, random.Random(seed))


@pytest.mark.parametrize(("collective", "name"), ALGORITHMS)
@pytest.mark.parametrize("n", [31, 63, 64])
def test_algorithm_is_proved_for_many_ranks(collective, name, n):
    schedule.build(collective, name, n, root=roots_of(collective, n)[-1]).verify()


@pytest.mark.parametrize(("collective", "name"), ALGORITHMS)
def test_algorithm_of_one_rank_has_no_steps(collective, name):
    assert schedule.build(collective, name, 1).num_steps == 0


@pytest.mark.parametrize(("collective", "name"), ALGORITHMS)
@pytest.mark.parametrize("n", [*range(1, 18), 33, 64])
def test_sent_bytes_equal_the_closed_form(collective, name, n):
    row = schedule.info(collective, name)
    for root in roots_of(collective, n) if n < 18 else [0]:
        s = schedule.build(collective, name, n, root)
        nbytes = message_bytes(s)
        sent = s.simulate(nbytes, ALPHA, BETA, GAMMA).sent_bytes
        assert list(sent) == pytest.approx(
            [row.sent_fraction(n, rank, root) * nbytes for rank in range(n)]
        )


def textbook_time_s(name, n, nbytes):
    rounds = math.ceil(math.log2(n))
    message_s = ALPHA + BETA * nbytes
    chunk_s = ALPHA + BETA * nbytes / n
    reduce_s = GAMMA * nbytes
    return {
        "ring": 2 * (n - 1) * chunk_s + (n - 1) * reduce_s / n,
        "halving_doubling": 2 * rounds * ALPHA
        + 2 * (n - 1) / n * BETA * nbytes
        + (n - 1) / n * reduce_s,
        "one_shot": (n - 1) * (message_s + reduce_s),
        "two_shot": 2 * (n - 1) * chunk_s + (n - 1) * reduce_s / n,
        "reduce_broadcast": 2 * rounds * message_s + rounds * reduce_s,
        "all_to_all": (n - 1) * (message_s + reduce_s),
        "ring_naive": 2 * (n - 1) * message_s + (n - 1) * reduce_s,
        "star": 2 * (n - 1) * message_s + (n - 1) * reduce_s,
    }[name]


ANY_N = ["ring", "one_shot", "two_shot", "all_to_all", "ring_naive", "star"]
CASES = [(name, n) for name in ANY_N for n in range(2, 18)]
CASES += [(name, n) for name in ("halving_doubling", "reduce_broadcast") for n in (2, 4, 8, 16)]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_simulated_time_equals_the_textbook_formula(name, n):
    s = schedule.build("all_reduce", name, n)
    nbytes = message_bytes(s)
    simulated_s = s.simulate(nbytes, ALPHA, BETA, GAMMA).time_s
    assert simulated_s == pytest.approx(textbook_time_s(name, n, nbytes), rel=1e-12)


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 13, 17])
def test_halving_doubling_of_any_n_has_optimal_bandwidth(n):
    s = schedule.build("all_reduce", "halving_doubling", n)
    nbytes = message_bytes(s)
    simulated_s = s.simulate(nbytes, 0.0, BETA, GAMMA).time_s
    optimal_s = (n - 1) / n * (2 * BETA + GAMMA) * nbytes
    assert simulated_s == pytest.approx(optimal_s, rel=1e-12)
    rounds = math.ceil(math.log2(n))
    assert 2 * rounds <= s.simulate(nbytes, 1.0, 0.0).time_s <= 4 * rounds


@pytest.mark.parametrize("n", range(2, 34))
def test_tree_makes_no_rank_inner_node_twice(n):
    s = schedule.build("all_reduce", "tree", n)
    per_tree = s.num_chunks // 2
    inner = [set(), set()]
    for move in s.moves:
        if move.kind == "copy":
            inner[move.chunks[0] // per_tree].add(move.src)
    assert not inner[0] & inner[1] or n == 1
    assert s.moves[-1].round <= 4 * math.ceil(math.log2(n)) + 2 * per_tree


def test_binomial_broadcast_takes_logarithmic_time():
    for n in (2, 4, 8, 16):
        s = schedule.build("broadcast", "binomial", n, root=n - 1)
        expected_s = math.log2(n) * (ALPHA + BETA * 960)
        assert s.simulate(960, ALPHA, BETA).time_s == pytest.approx(expected_s)


def test_min_slots_of_known_algorithms():
    def fewest(name, n, **options):
        return schedule.build("all_reduce", name, n).min_slots(**options)

    for n in (2, 3, 4, 8, 17):
        # A fused ring has every rank wait for a free slot of its neighbour at the same time.
        assert fewest("ring", n) == 2
        assert fewest("ring", n, fuse=False) == 1
        assert fewest("one_shot", n) == 1
    assert fewest("two_shot", 4) == 1
    assert fewest("two_shot", 4, multicast=False) == 2
    assert fewest("halving_doubling", 16) == 2
