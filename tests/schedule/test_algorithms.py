"""Every algorithm of the table, for many world sizes."""

import itertools
import math
import random
import time

import pytest
from cases import each_case
from program_oracle import check_programs

from pycoll import _core, schedule

pytestmark = pytest.mark.pure

ALGORITHMS = [(row.collective, row.name) for row in _core.algorithms()]
ALPHA, BETA, GAMMA = 3e-6, 2e-9, 5e-10  # seconds, seconds per byte


COLLECTIVES = {row.name: row for row in _core.collectives()}


def roots_of(collective, n):
    return range(n) if COLLECTIVES[collective].has_root else [0]


def payload_bytes(s):
    """A size that the chunks split evenly."""
    row = COLLECTIVES[s.collective]
    return 96 * s.num_chunks // row.num_blocks(s.n) * row.blocks_per_payload(s.n)


def lowerings_of(s):
    """All options; whether messages may be joined matters only where some are."""
    joins = any(
        first // pieces != (first + count - 1) // pieces
        for pieces in [s.num_chunks // COLLECTIVES[s.collective].num_blocks(s.n)]
        for first, count in (move.chunks for move in s.moves)
    )
    for fuse, multicast in itertools.product((False, True), repeat=2):
        for join_blocks in (True, False) if joins else (True,):
            yield {"fuse": fuse, "multicast": multicast, "join_blocks": join_blocks}
        if any(move.chunks[1] > 1 for move in s.moves) and not multicast:
            yield {"fuse": fuse, "multicast": multicast, "join_chunks": False}


ALL_SIZES = range(1, 18)
of_algorithms = each_case("collective, name", ALGORITHMS)


def of_sizes(sizes):
    """Every algorithm on so many ranks."""
    return each_case("collective, name, n", [(*a, n) for a in ALGORITHMS for n in sizes])


@pytest.mark.slow
@of_sizes(ALL_SIZES)
def test_algorithm_is_proved_with_8_slots_in_every_lowering(collective, name, n):
    for root in {0, n // 2, n - 1} & set(roots_of(collective, n)):
        s = schedule.build(collective, name, n, root)
        for lowering in lowerings_of(s):
            fewest = s.min_slots(8, **lowering)
            for slots in {fewest - 1, fewest, 8} - {0}:
                if slots >= fewest:
                    s.verify(slots, **lowering)
                else:
                    with pytest.raises(schedule.ScheduleError, match="deadlock"):
                        s.verify(slots, **lowering)


@of_sizes([1, 2, 3, 5, 8, 9])
def test_algorithm_computes_the_collective_in_random_order(collective, name, n):
    for root in {0, n // 2} & set(roots_of(collective, n)):
        s = schedule.build(collective, name, n, root)
        for multicast, join_blocks in itertools.product((False, True), repeat=2):
            lowering = {"multicast": multicast, "join_blocks": join_blocks}
            programs = s.programs(**lowering)
            check_programs(s, programs, s.min_slots(**lowering), random.Random(n))


@of_sizes([31, 64])
def test_algorithm_is_proved_for_many_ranks(collective, name, n):
    schedule.build(collective, name, n, root=roots_of(collective, n)[-1]).verify()


@of_algorithms
def test_algorithm_of_one_rank_has_no_steps(collective, name):
    assert schedule.build(collective, name, 1).num_steps == 0


@of_sizes([*ALL_SIZES, 33])
def test_sent_bytes_equal_the_closed_form(collective, name, n):
    row = schedule.info(collective, name)
    for root in {0, n // 2, n - 1} & set(roots_of(collective, n)):
        s = schedule.build(collective, name, n, root)
        nbytes = payload_bytes(s)
        sent = s.simulate(nbytes, ALPHA, BETA, GAMMA).sent_bytes
        assert list(sent) == pytest.approx(
            [row.sent_fraction(n, rank, root) * nbytes for rank in range(n)]
        )


def textbook_time_s(collective, name, n, nbytes):
    rounds = math.ceil(math.log2(n))
    message_s = ALPHA + BETA * nbytes
    chunk_s = ALPHA + BETA * nbytes / n
    reduce_s = GAMMA * nbytes
    others = (n - 1) / n
    halving_s = rounds * ALPHA + others * BETA * nbytes
    all_pairs_s = (n - 1) * chunk_s
    return {
        "all_reduce": {
            "ring": 2 * all_pairs_s + others * reduce_s,
            "halving_doubling": 2 * halving_s + others * reduce_s,
            "one_shot": (n - 1) * (message_s + reduce_s),
            "two_shot": 2 * all_pairs_s + others * reduce_s,
            "reduce_broadcast": 2 * rounds * message_s + rounds * reduce_s,
            "all_to_all": (n - 1) * (message_s + reduce_s),
            "ring_naive": 2 * (n - 1) * message_s + (n - 1) * reduce_s,
            "star": 2 * (n - 1) * message_s + (n - 1) * reduce_s,
        },
        "reduce_scatter": {
            "ring": all_pairs_s + others * reduce_s,
            "halving": halving_s + others * reduce_s,
            "all_pairs": all_pairs_s + others * reduce_s,
        },
        "all_gather": {
            "ring": all_pairs_s,
            "recursive_doubling": halving_s,
            "all_pairs": all_pairs_s,
        },
        "broadcast": {
            "binomial": rounds * message_s,
            "star": (n - 1) * message_s,
            "chain": (n - 1) * message_s,
        },
        "reduce": {
            "binomial": rounds * (message_s + reduce_s),
            "star": (n - 1) * (message_s + reduce_s),
            "chain": (n - 1) * (message_s + reduce_s),
        },
        "gather": {"binomial": halving_s, "star": all_pairs_s},
        "scatter": {"binomial": halving_s, "star": all_pairs_s},
        "all_to_all": {"pairwise": all_pairs_s, "all_pairs": all_pairs_s},
        "scan": {"chain": (n - 1) * (message_s + reduce_s)},
        "exscan": {"chain": (n - 1) * message_s + (n - 2) * reduce_s},
        "neighbor_exchange": {"direct": 2 * ALPHA + BETA * nbytes},
    }[collective][name]


POWERS_OF_TWO = {
    "halving_doubling",
    "reduce_broadcast",
    "halving",
    "recursive_doubling",
    "binomial",
}
NO_FORMULA = {
    ("all_reduce", "tree"),
    ("all_gather", "bruck"),  # messages that wrap around are two
    ("broadcast", "scatter_all_gather"),  # the halves overlap
    ("reduce", "two_shot"),
    ("reduce", "reduce_scatter_gather"),
    ("all_to_all", "bruck"),
    ("scan", "recursive_doubling"),
    ("scan", "all_pairs"),
    ("exscan", "recursive_doubling"),
    ("exscan", "all_pairs"),
}
CASES = [
    (collective, name, n)
    for collective, name in ALGORITHMS
    if (collective, name) not in NO_FORMULA
    for n in ((2, 4, 8, 16) if name in POWERS_OF_TWO else ALL_SIZES[1:])
]


@each_case("collective, name, n", CASES)
def test_simulated_time_equals_the_textbook_formula(collective, name, n):
    s = schedule.build(collective, name, n)
    nbytes = payload_bytes(s)
    simulated_s = s.simulate(nbytes, ALPHA, BETA, GAMMA).time_s
    assert simulated_s == pytest.approx(textbook_time_s(collective, name, n, nbytes), rel=1e-12)


@each_case("n", [3, 5, 6, 7, 12, 13, 17])
def test_halving_doubling_of_any_n_has_optimal_bandwidth(n):
    s = schedule.build("all_reduce", "halving_doubling", n)
    nbytes = payload_bytes(s)
    simulated_s = s.simulate(nbytes, 0.0, BETA, GAMMA).time_s
    optimal_s = (n - 1) / n * (2 * BETA + GAMMA) * nbytes
    assert simulated_s == pytest.approx(optimal_s, rel=1e-12)
    rounds = math.ceil(math.log2(n))
    assert 2 * rounds <= s.simulate(nbytes, 1.0, 0.0).time_s <= 4 * rounds


@each_case("n", range(2, 34))
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


@of_sizes([2, 3, 5, 8, 17])
def test_one_block_a_message_is_proved_with_2_slots_and_sends_the_same_bytes(collective, name, n):
    s = schedule.build(collective, name, n)
    pieces = s.num_chunks // COLLECTIVES[collective].num_blocks(n)
    programs = s.programs(join_blocks=False)
    assert s.min_slots(2, join_blocks=False) <= 2
    assert s.min_slots(2, join_chunks=False) <= 2
    assert all(program.max_range == 1 for program in s.programs(join_chunks=False))
    for program in programs:
        assert program.max_range <= pieces
        for step in program.steps:
            last = step.first_chunk + step.num_chunks - 1
            assert step.first_chunk // pieces == last // pieces
    joined = [sum(len(t.dst_peers) * t.num_chunks for t in p.steps) for p in s.programs()]
    split = [sum(len(t.dst_peers) * t.num_chunks for t in p.steps) for p in programs]
    assert joined == split


ORDERS = {
    "flat": {"one_shot", "two_shot", "all_to_all", "star", "all_pairs"},
    "left_fold": {"ring_naive", "chain"},
}


@of_algorithms
def test_order_of_reduction_is_what_the_name_promises(collective, name):
    has_op = COLLECTIVES[collective].has_op
    for n in (4, 8, 11):
        for root in {0, n // 2, n - 1} & set(roots_of(collective, n)):
            order = schedule.build(collective, name, n, root).verify().order
            if not has_op:
                assert order == "flat"
            else:
                expected = [o for o, names in ORDERS.items() if name in names] or ["other"]
                if (collective, name) == ("reduce", "chain"):
                    expected = ["other"]  # from the far end to the root
                # A tree over rank 0 may happen to be a left fold.
                assert order in (expected if name != "binomial" else ("other", "left_fold"))


@each_case("collective", [row.name for row in _core.collectives() if row.has_op])
def test_every_reducing_collective_has_a_flat_algorithm(collective):
    orders = [
        schedule.build(collective, name, 5).verify().order
        for name in schedule.algorithms(collective)
    ]
    assert "flat" in orders


@pytest.mark.soak  # compares times
@each_case("name", [n for c, n in ALGORITHMS if c == "all_to_all"])
def test_planning_of_64_ranks_takes_less_than_half_a_second(name):
    began_s = time.process_time()
    s = schedule.build("all_to_all", name, 64)
    s.programs()
    s.min_slots(8)
    assert time.process_time() - began_s < 0.5
