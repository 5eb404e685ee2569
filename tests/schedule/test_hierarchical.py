"""Schedules of hosts: proved, and with the fewest bytes between hosts."""

import random

import pytest
from cases import each_case
from program_oracle import check_programs

from pycoll import schedule

pytestmark = pytest.mark.pure

SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 15, 16)
WORLDS = [(n, m) for n in SIZES for m in range(1, n + 1) if n % m == 0] + [(32, 8), (64, 8)]
of_collectives = each_case(
    "collective",
    ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"),
)


@of_collectives
@each_case("n, per_host", WORLDS)
def test_hierarchical_schedule_is_proved_with_8_slots(collective, n, per_host):
    for root in {0, n // 2, n - 1} if collective in ("broadcast", "reduce") else {0}:
        s = schedule.build_hierarchical(collective, n, per_host, root)
        assert s.min_slots(8) <= 8
        s.verify(8, multicast=False)
        s.verify(8, join_blocks=False)
        assert s.min_slots(4, join_chunks=False) <= 4  # twice that for two tiles at once


@of_collectives
@each_case("n, per_host", [(4, 2), (6, 3), (8, 2), (12, 4)])
def test_hierarchical_schedule_computes_the_collective_in_random_order(collective, n, per_host):
    s = schedule.build_hierarchical(collective, n, per_host)
    check_programs(s, s.programs(), s.min_slots(), random.Random(n))


@of_collectives
@each_case("n, per_host", [(8, 4), (12, 4), (16, 2)])
def test_hosts_send_the_fewest_bytes_to_each_other(collective, n, per_host):
    s = schedule.build_hierarchical(collective, n, per_host)
    num_hosts = n // per_host
    sent = [0.0] * num_hosts
    for move in s.moves:
        if move.src // per_host != move.dst // per_host:
            sent[move.src // per_host] += move.chunks[1] / s.chunks_per_message
    others = (num_hosts - 1) / num_hosts
    if collective in ("broadcast", "reduce"):
        assert sum(sent) == pytest.approx(num_hosts - 1)
    else:
        # In all_to_all every rank of a host has a message of its own.
        factor = {"all_reduce": 2, "all_to_all": per_host}.get(collective, 1)
        assert sent == pytest.approx([factor * others] * num_hosts)


@each_case("n, per_host", [(8, 4), (12, 4), (16, 2)])
def test_all_to_all_sends_one_message_to_each_other_host(n, per_host):
    s = schedule.build_hierarchical("all_to_all", n, per_host)
    between = [move for move in s.moves if move.src // per_host != move.dst // per_host]
    assert len(between) == n * (n // per_host - 1)


def test_hosts_that_do_not_make_the_world_are_refused():
    with pytest.raises(ValueError, match="hosts of 3 ranks"):
        schedule.build_hierarchical("all_reduce", 8, 3)
    with pytest.raises(ValueError, match="no hierarchical schedule for scan"):
        schedule.build_hierarchical("scan", 8, 4)
