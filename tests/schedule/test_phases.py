"""Phases: which steps form one, and that the proof refuses those that depend on each other."""

import pytest
from cases import each_case

from pycoll import _core, schedule

pytestmark = pytest.mark.pure

ALGORITHMS = [(row.collective, row.name) for row in _core.algorithms()]
ALL = -1  # in place of a rank
SAME_PHASE = 32  # in Step.flags
MAX_SLOTS = 8  # of links between devices


def device_programs(built, **options):
    return built.programs(multicast=False, phases=True, **options)


def phases_of(program):
    """The steps of each phase."""
    phases = []
    for step in program.steps:
        if step.same_phase:
            phases[-1].append(step)
        else:
            phases.append([step])
    return phases


def apart(step):
    return step.replace(flags=step.flags & ~SAME_PHASE)


def joined(programs, rank, step_idx):
    """The programs, where one step of a rank, or of all, belongs to the phase before it, too."""

    def join(program):
        steps = program.steps
        steps[step_idx] = steps[step_idx].replace(flags=steps[step_idx].flags | SAME_PHASE)
        return program.with_steps(steps)

    return [join(p) if rank in (p.rank, ALL) else p for p in programs]


def backwards(programs):
    """The programs without phases, where the steps of each phase come in the reverse order."""
    return [
        program.with_steps(
            [apart(step) for steps in phases_of(program) for step in reversed(steps)]
        )
        for program in programs
    ]


@each_case("collective, name", ALGORITHMS)
def test_phases_of_every_algorithm_are_proved_in_any_order_of_their_steps(collective, name):
    for n in range(2, 18):
        built = schedule.build(collective, name, n)
        for options in ({}, {"join_blocks": False}, {"join_chunks": False}):
            programs = device_programs(built, **options)
            slots, error = _core.min_safe_slots(built._core, programs, MAX_SLOTS)
            assert slots > 0, (n, options, error)
            proof = _core.verify_programs(built._core, backwards(programs), slots)
            assert proof.ok, (n, options, proof.error)


@each_case("collective, name", ALGORITHMS)
def test_phases_contain_the_steps_of_the_program_in_their_order(collective, name):
    for n in (2, 5, 8):
        built = schedule.build(collective, name, n)
        for alone, program in zip(
            built.programs(multicast=False), device_programs(built), strict=True
        ):
            expected = [(s.src_mask, s.dst_mask, s.first_chunk, s.flags) for s in alone.steps]
            found = map(apart, program.steps)
            assert [(s.src_mask, s.dst_mask, s.first_chunk, s.flags) for s in found] == expected


def test_programs_have_no_phases_unless_they_are_asked_for():
    built = schedule.build("all_to_all", "all_pairs", 5)
    assert not any(step.same_phase for program in built.programs() for step in program.steps)


def test_two_shot_has_a_phase_for_sends_one_for_sums_and_one_for_results():
    for program in device_programs(schedule.build("all_reduce", "two_shot", 8)):
        sends, (total,), results = phases_of(program)
        assert len(sends) == len(results) == 7
        assert all(len(s.dst_peers) == 1 and not s.src_peers for s in sends)
        assert len(total.src_peers) == len(total.dst_peers) == 7
        assert all(len(s.src_peers) == 1 and not s.dst_peers for s in results)


def test_receive_shares_a_phase_with_the_next_send_only():
    """The pairwise exchange receives from one rank while it sends to the next one."""
    for program in device_programs(schedule.build("all_to_all", "pairwise", 5)):
        kinds = [[bool(s.src_peers) for s in steps] for steps in phases_of(program)]
        assert kinds == [[False], [True, False], [True, False], [True, False], [True]]


WRONG = [
    # Ranks that wait for each other's messages before they send their own.
    ("all_to_all", "all_pairs", 4, ALL, 3, "deadlock: rank 0, step 3"),
    ("all_to_all", "pairwise", 3, ALL, 1, "deadlock: rank 0, step 1"),
    ("all_reduce", "two_shot", 4, 0, 3, "step 0, which also sends to rank 1"),
    ("all_reduce", "halving_doubling", 4, 0, 2, "step 1, which writes chunk"),
    ("all_reduce", "ring", 4, 0, 2, "step 1, which also sends to rank 1"),
    ("all_reduce", "ring", 4, 0, 6, "step 5, which also receives from rank 3"),
    ("all_reduce", "ring_naive", 4, 1, 1, "step 0, which reads chunk 0"),
    ("all_reduce", "one_shot", 4, 0, 1, "step 0, which reads chunk 0"),
    ("broadcast", "scatter_all_gather", 4, 0, 4, "step 3, which also sends to rank 1"),
    ("all_gather", "bruck", 4, 0, 2, "step 1, which writes chunk 1"),
]


@each_case("collective, name, n, rank, step_idx, message", WRONG)
def test_steps_that_depend_on_each_other_are_refused_as_a_phase(
    collective, name, n, rank, step_idx, message
):
    built = schedule.build(collective, name, n)
    programs = joined(device_programs(built), rank, step_idx)
    proof = _core.verify_programs(built._core, programs, MAX_SLOTS)
    assert not proof.ok and message in proof.error, proof.error


def test_first_step_has_no_phase_to_join():
    built = schedule.build("all_reduce", "ring", 3)
    proof = _core.verify_programs(built._core, joined(device_programs(built), 1, 0), MAX_SLOTS)
    assert "has no phase to join" in proof.error


def test_phase_of_more_steps_than_a_block_has_room_for_is_refused():
    built = schedule.build("all_reduce", "two_shot", 34)
    programs = device_programs(built)
    assert _core.verify_programs(built._core, programs, MAX_SLOTS).ok
    sends = phases_of(programs[0])[0]
    proof = _core.verify_programs(built._core, joined(programs, 0, len(sends)), MAX_SLOTS)
    assert "begins a phase of 33 steps, more than 32" in proof.error


def test_joined_phases_are_refused_or_their_steps_are_right_in_the_reverse_order():
    """Joins each phase of each rank with the one before it."""
    num_refused = num_proved = 0
    for collective, name in ALGORITHMS:
        for n in (4, 5):
            built = schedule.build(collective, name, n)
            good = device_programs(built)
            for rank, program in enumerate(good):
                for step_idx in range(1, len(program.steps)):
                    if program.steps[step_idx].same_phase:
                        continue
                    programs = joined(good, rank, step_idx)
                    if not _core.verify_programs(built._core, programs, MAX_SLOTS).ok:
                        num_refused += 1
                        continue
                    num_proved += 1
                    proof = _core.verify_programs(built._core, backwards(programs), MAX_SLOTS)
                    assert proof.ok, (collective, name, n, rank, step_idx, proof.error)
    print(f"{num_refused} refused, {num_proved} proved")
    assert num_refused > 2 * num_proved > 0
