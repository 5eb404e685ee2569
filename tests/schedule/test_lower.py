"""From moves to programs: fan-in, fan-out, fusion, dead writes, the final step."""

import pytest

from pycoll import _core, schedule

pytestmark = pytest.mark.pure


def lowered(moves, n, num_chunks=1, collective="all_reduce", multicast_moves=True, **options):
    core = _core.schedule_from_moves(collective, "test", n, num_chunks, 0, moves, multicast_moves)
    return core.programs(**options)


def test_ring_without_fusion_has_a_step_per_send_and_receive():
    for program in schedule.build("all_reduce", "ring", 5).programs(fuse=False):
        assert len(program.steps) == 4 * 4


def test_moves_with_one_destination_become_fan_in_in_rank_order():
    programs = lowered([(0, "reduce", 0, 1, src, 2) for src in (4, 0, 3, 1)], n=5)
    (step,) = programs[2].steps
    assert step.src_peers == [0, 1, 3, 4]
    assert programs[2].peers == [0, 1, 3, 4]
    assert programs[2].self_position == 2
    assert step.read_local and step.write_local and step.final


def test_moves_with_one_source_become_fan_out():
    programs = lowered([(0, "reduce", 0, 1, 0, dst) for dst in (1, 2)], n=4)
    (step,) = programs[0].steps
    assert step.dst_peers == [1, 2]
    assert not step.multicast_dst


def test_fan_out_to_all_becomes_one_multicast_slot():
    moves = [(0, "copy", 0, 1, 0, dst) for dst in (1, 2, 3)]
    programs = lowered(moves, n=4, collective="broadcast")
    (step,) = programs[0].steps
    assert step.multicast_dst and step.dst_peers == [1, 2, 3]
    assert all(program.steps[0].multicast_src for program in programs[1:])
    (step,) = lowered(moves, n=4, collective="broadcast", multicast=False)[0].steps
    assert not step.multicast_dst and step.dst_peers == [1, 2, 3]


def test_fan_out_to_all_beside_another_send_stays_unicast():
    moves = [(0, "reduce", 0, 1, 0, dst) for dst in (1, 2, 3)] + [(0, "reduce", 1, 1, 1, 2)]
    programs = lowered(moves, n=4, num_chunks=2)
    assert not any(s.multicast_dst or s.multicast_src for p in programs for s in p.steps)


def test_two_ranks_need_no_multicast():
    programs = schedule.build("all_reduce", "one_shot", 2).programs()
    assert not any(s.multicast_dst or s.multicast_src for p in programs for s in p.steps)


def test_send_is_not_fused_past_a_change_of_its_chunks():
    moves = [(0, "copy", 0, 1, 0, 1), (1, "copy", 0, 1, 2, 1), (2, "copy", 0, 1, 1, 3)]
    steps = lowered(moves, n=4)[1].steps
    assert [(s.src_peers, s.dst_peers) for s in steps] == [([0], []), ([2], [3])]


def test_send_is_not_fused_past_a_message_on_the_same_link():
    # Chunk 1 arrives last but chunk 0 must still be first on the link from rank 1 to rank 2.
    moves = [(0, "copy", 1, 1, 0, 1), (1, "copy", 0, 1, 1, 2), (1, "copy", 1, 1, 1, 2)]
    steps = lowered(moves, n=3, num_chunks=2)[1].steps
    assert [(s.src_peers, s.dst_peers, s.first_chunk) for s in steps] == [
        ([0], [], 1),
        ([], [2], 0),
        ([], [2], 1),
    ]


def test_sends_of_one_round_precede_its_receives():
    # Both ranks pass on what they had before the round.
    moves = [(0, "reduce", 0, 1, 0, 1), (0, "reduce", 0, 1, 1, 0)]
    for program in lowered(moves, n=2):
        assert [bool(step.dst_peers) for step in program.steps] == [True, False]


def test_partly_completed_range_is_refused():
    moves = [(0, "reduce", 0, 1, 0, 1), (1, "reduce", 0, 2, 2, 1)]
    with pytest.raises(schedule.UsageError, match="separate moves"):
        lowered(moves, n=3, num_chunks=2)


def test_more_than_64_peers_are_refused():
    schedule.build("all_reduce", "star", 65).verify()
    with pytest.raises(schedule.UsageError, match="65 peers; at most 64"):
        schedule.build("all_reduce", "star", 66).programs()


def test_max_range_is_over_all_ranks():
    programs = lowered([(0, "copy", 0, 3, 0, 1), (1, "copy", 3, 1, 2, 1)], n=3, num_chunks=4)
    assert [program.max_range for program in programs] == [3, 3, 3]


def test_split_round_still_reads_what_was_there_when_it_began():
    """Rank 1 sends blocks 0 and 1 in the round in which it receives block 1."""
    moves = [
        (0, "reduce", 1, 1, 2, 1),
        (0, "reduce", 0, 2, 1, 0),  # of block 1, only the start values of ranks 0 and 1
        (0, "reduce", 2, 1, 0, 2),
        (0, "reduce", 2, 1, 1, 2),
        (1, "reduce", 1, 1, 0, 2),
        (1, "reduce", 0, 1, 2, 0),
        (2, "copy", 1, 1, 2, 1),
    ]
    core = _core.schedule_from_moves("reduce_scatter", "test", 3, 3, 0, moves)
    for join_blocks in (True, False):
        programs = core.programs(True, True, join_blocks)
        assert _core.verify_programs(core, programs, 2).error == ""
        assert {step.round for program in programs for step in program.steps} == {0, 1, 2}
    assert [program.max_range for program in core.programs(True, True, False)] == [1, 1, 1]
    assert [program.max_range for program in core.programs()] == [2, 2, 2]


def test_split_keeps_pieces_of_one_block_together():
    moves = [(0, "copy", 1, 4, 0, 1)]  # of 3 pieces a block: two, and two
    core = _core.schedule_from_moves("scatter", "test", 2, 6, 0, moves)
    steps = core.programs(True, True, False)[0].steps
    assert [(step.first_chunk, step.num_chunks) for step in steps] == [(1, 2), (3, 2)]


def test_split_takes_the_blocks_of_a_round_one_after_another():
    """So that one slot is enough, where all blocks at once would need eight."""
    programs = schedule.build("reduce_scatter", "halving", 16).programs(join_blocks=False)
    kinds = ["send" if step.dst_peers else "recv" for step in programs[0].steps[:16]]
    assert kinds == ["send", "recv"] * 8
