"""What the proof refuses, and the words it finds for it."""

import pytest
from cases import each_case

from pycoll import _core, schedule

pytestmark = pytest.mark.pure


def proof_of(moves, n=2, num_chunks=1, slots=8, collective="all_reduce", root=0):
    core = _core.schedule_from_moves(collective, "test", n, num_chunks, root, moves)
    return _core.verify_programs(core, core.programs(), slots)


def with_step(programs, rank, step_idx, **changes):
    """The programs with one step of one rank changed."""
    steps = programs[rank].steps
    steps[step_idx] = steps[step_idx].replace(**changes)
    return [p.with_steps(steps) if p.rank == rank else p for p in programs]


END = "at the end: "
CHAIN = [(0, "reduce", 0, 1, 0, 1), (1, "reduce", 0, 1, 1, 2)]
SHIFT = [(0, "copy", 0, 1, 0, 1), (0, "copy", 0, 1, 1, 2)]


@each_case(
    "collective, n, num_chunks, moves, message",
    [
        (
            "all_reduce", 2, 1, [(0, "reduce", 0, 1, 0, 1)],
            "all_reduce test, 2 ranks, 8 slots: rank 0, chunk 0, at the end: rank 1 has not "
            "contributed",
        ),
        (
            "all_reduce", 2, 1,
            [(0, "reduce", 0, 1, 0, 1), (1, "reduce", 0, 1, 0, 1), (2, "copy", 0, 1, 1, 0)],
            "counts a contribution to chunk 0 twice",
        ),
        (
            "broadcast", 3, 1, [(0, "copy", 0, 1, 1, 2)],
            "rank 1, step 0 (round 0, send chunk 0 -> rank 2) reads chunk 0 before",
        ),
        ("broadcast", 3, 1, SHIFT[:1], f"rank 2, chunk 0, {END}no value has arrived"),
        ("scan", 3, 1, CHAIN[1:], f"rank 1, chunk 0, {END}rank 0 has not contributed"),
        (
            "scan", 3, 1, [*CHAIN, (2, "copy", 0, 1, 2, 1)],
            f"rank 1, chunk 0, {END}rank 2 has contributed, but only ranks 0 to 1 may",
        ),
        ("exscan", 3, 1, SHIFT[1:], f"rank 1, chunk 0, {END}rank 0 has not contributed"),
        ("exscan", 2, 1, CHAIN[:1], "rank 1 has contributed, but only ranks 0 to 0 may"),
        (
            "all_to_all", 2, 4, [(0, "copy", 1, 1, 0, 1)],
            f"rank 0, chunk 2, {END}no value has arrived",
        ),
        (
            "scatter", 2, 2, [(0, "copy", 0, 1, 0, 1), (1, "copy", 0, 1, 1, 0)],
            f"rank 1, chunk 1, {END}no value has arrived",
        ),
    ],
)  # fmt: skip
def test_wrong_result_is_refused_and_named(collective, n, num_chunks, moves, message):
    proof = proof_of(moves, n, num_chunks, collective=collective)
    assert not proof.ok and message in proof.error


def test_right_results_are_proved():
    assert proof_of([(0, "reduce", 0, 1, 0, 1), (0, "reduce", 0, 1, 1, 0)]).ok
    assert proof_of(CHAIN, n=3, collective="scan").ok
    assert proof_of([*SHIFT, (1, "reduce", 0, 1, 1, 2)], n=3, collective="exscan").ok
    assert proof_of(SHIFT[:1], collective="broadcast").ok
    assert not proof_of(SHIFT[:1], collective="broadcast", root=1).ok


def test_different_order_of_reduction_is_refused():
    moves = [
        (0, "reduce", 0, 1, 1, 0),
        (0, "reduce", 0, 1, 2, 0),  # 0 + 1 + 2, rounded once
        (0, "reduce", 0, 1, 0, 1),
        (1, "reduce", 0, 1, 2, 1),  # (0 + 1) + 2, rounded twice
        (2, "copy", 0, 1, 0, 2),
    ]
    error = proof_of(moves, n=3).error
    assert "rank 1, chunk 0, at the end: the reduction was done in another order" in error
    moves[3] = (2, "copy", 0, 1, 0, 1)
    assert proof_of(moves, n=3).ok


def test_last_factor_is_refused_in_a_scan():
    s = schedule.build("scan", "chain", 3)
    assert not any(step.final for program in s.programs() for step in program.steps)
    flags = s.programs()[2].steps[-1].flags
    programs = with_step(s.programs(), rank=2, step_idx=-1, flags=flags | 4)
    error = _core.verify_programs(s.core, programs, 8).error
    assert "asks for no reduction of all ranks' values" in error


@each_case(
    "moves, order",
    [
        ([(0, "reduce", 0, 1, 1, 0), (0, "reduce", 0, 1, 2, 0), (0, "reduce", 0, 1, 3, 0)], "flat"),
        ([(i, "reduce", 0, 1, i + 1, 0) for i in range(3)], "left_fold"),
        # (r0 + r1) + r2 + r3: the second step goes on where the first one stopped.
        (
            [(0, "reduce", 0, 1, 1, 0), (1, "reduce", 0, 1, 2, 0), (1, "reduce", 0, 1, 3, 0)],
            "left_fold",
        ),
        # r0 + (r1 + r2) + r3, (r0 + r2) + r1 + r3, and (r0 + r1) + (r2 + r3)
        (
            [(0, "reduce", 0, 1, 2, 1), (1, "reduce", 0, 1, 1, 0), (1, "reduce", 0, 1, 3, 0)],
            "other",
        ),
        (
            [(0, "reduce", 0, 1, 2, 0), (1, "reduce", 0, 1, 1, 0), (1, "reduce", 0, 1, 3, 0)],
            "other",
        ),
        (
            [(0, "reduce", 0, 1, 1, 0), (0, "reduce", 0, 1, 3, 2), (1, "reduce", 0, 1, 2, 0)],
            "other",
        ),
    ],
)
def test_order_of_reduction_is_told(moves, order):
    proof = proof_of(moves, n=4, collective="reduce")
    assert proof.ok and proof.order == order


def test_order_is_that_of_the_least_canonical_chunk():
    fan_in = [(0, "reduce", 0, 1, 1, 0), (0, "reduce", 0, 1, 2, 0)]
    chain = [(0, "reduce", 1, 1, 1, 0), (1, "reduce", 1, 1, 2, 0)]
    assert proof_of([*fan_in, *chain], n=3, num_chunks=2, collective="reduce").order == "left_fold"


def test_deadlock_names_the_circle_of_waits():
    s = schedule.build("all_reduce", "ring", 3)
    with pytest.raises(schedule.ScheduleError) as caught:
        s.verify(slots=1)
    assert str(caught.value) == (
        "all_reduce ring, 3 ranks, 1 slot: deadlock: "
        "rank 0, step 1 (round 0, recv-reduce-send chunk 1: self, rank 2 -> rank 1) "
        "waits for a free slot to rank 1; "
        "rank 1, step 1 (round 0, recv-reduce-send chunk 2: rank 0, self -> rank 2) "
        "waits for a free slot to rank 2; "
        "rank 2, step 1 (round 0, recv-reduce-send chunk 0: rank 1, self -> rank 0) "
        "waits for a free slot to rank 0"
    )


def test_programs_that_do_not_fit_each_other_are_refused():
    def error_of(name, rank, edit):
        s = schedule.build("all_reduce", name, 4 if name == "ring" else 3)
        programs = s.programs()
        programs[rank] = programs[rank].with_steps(edit(programs[rank].steps))
        return _core.verify_programs(s.core, programs, 8).error

    error = error_of("star", 1, lambda steps: steps[1:])
    assert "deadlock" in error and "waits for a message from rank 1" in error
    error = error_of("star", 2, lambda steps: steps[:1])
    assert "rank 2 never reads chunks [0, 1) that rank 0 sends to it" in error
    error = error_of("ring", 0, lambda steps: [steps[0].replace(first_chunk=2), *steps[1:]])
    assert "expects chunks [3, 4) from rank 0, but the link's next message holds" in error


def test_final_flag_is_proved_to_apply_once():
    s = schedule.build("all_reduce", "star", 3)
    steps = s.programs()[0].steps
    final = next(i for i, step in enumerate(steps) if step.final)
    receive = s.programs()[1].steps[-1]
    for rank, step_idx, flags, message in (
        (0, final, steps[final].flags & ~4, "the operator's last factor has not been applied"),
        (1, -1, receive.flags | 4, "a second time"),
        (1, 0, 1 | 4, "marked as the end of the reduction of chunk 0, but rank 0 has not"),
    ):
        programs = with_step(s.programs(), rank, step_idx, flags=flags)
        assert message in _core.verify_programs(s.core, programs, 8).error


@each_case(
    "changes, message",
    [
        ({"flags": 1 | 128}, "unknown flags"),
        ({"first_chunk": -1}, "chunks that do not exist"),
        ({"first_chunk": 2**31 - 1}, "chunks that do not exist"),
        ({"num_chunks": 0}, "chunks that do not exist"),
        ({"num_chunks": 2**31 - 1}, "chunks that do not exist"),
        ({"num_chunks": 2, "first_chunk": 0}, "more chunks than a slot holds"),
        ({"dst_mask": 1 << 63}, "a peer that does not exist"),
        ({"src_mask": 1 << 9}, "a peer that does not exist"),
        ({"flags": 0}, "has no source"),
        ({"dst_mask": 0}, "has no destination"),
        ({"flags": 1 | 8}, "without a source"),
        ({"flags": 1 | 16}, "without all ranks"),
    ],
)
def test_malformed_step_is_refused(changes, message):
    s = schedule.build("all_reduce", "ring", 4)
    programs = with_step(s.programs(), rank=2, step_idx=0, **changes)
    proof = _core.verify_programs(s.core, programs, 8)
    assert not proof.ok
    assert "rank 2, step 0 " in proof.error and message in proof.error


def test_program_of_another_schedule_is_refused():
    s = schedule.build("all_reduce", "ring", 4)
    programs = s.programs()
    assert "3 programs" in _core.verify_programs(s.core, programs[:3], 8).error
    swapped = [programs[1], programs[0], *programs[2:]]
    assert "another rank's number" in _core.verify_programs(s.core, swapped, 8).error
    other = schedule.build("all_reduce", "star", 4).programs()
    assert "another number of chunks" in _core.verify_programs(s.core, other, 8).error


def test_chunks_that_do_not_divide_into_blocks_are_refused():
    for collective, blocks in (("all_gather", 3), ("all_to_all", 9), ("neighbor_exchange", 6)):
        with pytest.raises(
            schedule.UsageError, match=f"a multiple of its {blocks} blocks .* got 5"
        ):
            _core.schedule_from_moves(collective, "test", 3, 5, 0, [])


def test_no_slots_are_refused():
    with pytest.raises(schedule.UsageError, match="slots is 0, expected a whole number from 1 to"):
        schedule.build("all_reduce", "ring", 4).verify(slots=0)
    with pytest.raises(schedule.ScheduleError, match="deadlock"):
        schedule.build("all_reduce", "ring", 4).min_slots(max_slots=1)


def test_multicast_slot_is_busy_until_its_last_reader_is_done():
    moves = [(chunk, "copy", chunk, 1, 0, dst) for chunk in (0, 1) for dst in (1, 2)]
    moves.append((2, "copy", 2, 1, 2, 1))
    core = _core.schedule_from_moves("all_reduce", "test", 3, 3, 0, moves)
    programs = core.programs()
    # Rank 1 reads the ring only after a message that rank 2 sends when it has read it twice.
    steps = programs[1].steps
    programs[1] = programs[1].with_steps([steps[2], steps[0], steps[1]])
    with_one_slot = _core.verify_programs(core, programs, 1).error
    assert "deadlock" in with_one_slot and "waits for a free slot to rank 1" in with_one_slot
    assert "has not contributed" in _core.verify_programs(core, programs, 2).error
